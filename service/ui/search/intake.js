// Images that are dropped, pasted or picked. Each calls onImages(files) or onRefused(title, detail).

const TEXT_FIELD = "textarea, " +
  ["email", "number", "password", "search", "tel", "text", "url"].map((type) => `input[type=${type}]`).join();
const FORMATS = "Use a JPEG, PNG, WebP, AVIF, GIF, BMP or TIFF photo. Some shops also accept HEIC.";

function judge(files, { onImages, onRefused }, source) {
  const list = [...files];
  // A file without a type may still be an image; the service checks it.
  const images = list.filter(({ type }) => type.startsWith("image/") || type === "");
  if (images.length > 0) return onImages(images);
  if (list.length === 0) return onRefused(`There is no photo in the ${source}`, FORMATS);
  const [{ name, type }] = list;
  return onRefused(`“${name}” is not a photo`, `Its type is ${type}. ${FORMATS}`);
}

function acceptDrops(handlers) {
  const mark = (on) => document.body.classList.toggle("dragging", on);
  addEventListener("dragover", (event) => {
    event.preventDefault();
    mark(true);
  });
  addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) mark(false);
  });
  addEventListener("dragend", () => mark(false));
  addEventListener("drop", (event) => {
    event.preventDefault();
    mark(false);
    judge(event.dataTransfer?.files ?? [], handlers, "drop");
  });
}

function acceptPastes(handlers) {
  addEventListener("paste", (event) => {
    if (event.target instanceof Element && event.target.matches(TEXT_FIELD)) return; // text is being pasted
    event.preventDefault();
    judge(event.clipboardData?.files ?? [], handlers, "clipboard");
  });
}

function acceptPicks(input, handlers) {
  input.addEventListener("change", () => {
    if (input.files.length > 0) judge(input.files, handlers, "selection");
    input.value = ""; // the same file can be picked again
  });
}

export function acceptImages(elements, handlers) {
  acceptDrops(handlers);
  acceptPastes(handlers);
  acceptPicks(elements.file, handlers);
  acceptPicks(elements.photo, handlers);
  elements.pick.addEventListener("click", () => elements.file.click());
  elements.drop.addEventListener("click", (event) => {
    if (!event.target.closest("button, input, .query")) elements.file.click();
  });
}

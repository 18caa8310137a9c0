// The four ways in: drop, paste, pick, photograph. Each ends in onImage(file) or onRefused(title, detail).

const FORMATS = "Kinlens reads JPEG, PNG, WebP, GIF, BMP and TIFF images.";

function judge(files, { onImage, onRefused }, source) {
  const list = [...files];
  // A file without a type may still be an image: the service decides.
  const file = list.find((candidate) => candidate.type.startsWith("image/")) ??
    list.find((candidate) => candidate.type === "");
  if (file) return onImage(file);
  if (list.length === 0) return onRefused(`There is no image in the ${source}`, FORMATS);
  const [{ name, type }] = list;
  return onRefused(`“${name}” is not an image`, `Its type is ${type}. ${FORMATS}`);
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
    event.preventDefault();
    judge(event.clipboardData?.files ?? [], handlers, "clipboard");
  });
}

function acceptPicks(button, input, handlers) {
  button.addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    if (input.files.length > 0) judge(input.files, handlers, "selection");
    input.value = ""; // the same file can be picked again
  });
}

export function acceptImages(elements, handlers) {
  acceptDrops(handlers);
  acceptPastes(handlers);
  acceptPicks(elements.pick, elements.file, handlers);
  acceptPicks(elements.camera, elements.photo, handlers);
  elements.drop.addEventListener("click", (event) => {
    if (!event.target.closest("button, input")) elements.file.click();
  });
}

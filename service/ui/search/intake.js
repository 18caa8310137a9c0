// Images that are dropped, pasted or picked. Each calls onImages(files), and then onLeftOut(text) if other
// files came with them, or onRefused(title, detail).

import { acceptDrops } from "../shared/dom.js";
import { someOf } from "../shared/format.js";

const TEXT_FIELD = "textarea, " +
  ["email", "number", "password", "search", "tel", "text", "url"].map((type) => `input[type=${type}]`).join();
const NO_PHOTO = /(^|\/)\.|\.(csv|docx?|html?|json|log|md|mov|mp[34]|pdf|pptx?|rtf|txt|xlsx?|xml|zip)$/i;
const FORMATS = "Use a JPEG, PNG, WebP, AVIF, GIF, BMP or TIFF photo. Some shops also accept HEIC.";

// A file without a type may still be an image, which the service checks, unless its name has the ending of another kind.
const isPhoto = ({ name, type }) => type.startsWith("image/") || (type === "" && !NO_PHOTO.test(name));

function judge(files, { onImages, onLeftOut, onRefused }, source) {
  const list = [...files];
  const images = list.filter(isPhoto);
  const others = list.filter((file) => !images.includes(file)).map(({ name }) => name);
  if (images.length > 0) {
    onImages(images);
    const verb = others.length === 1 ? "is not a photo" : "are not photos";
    if (others.length > 0) onLeftOut(`${others.length} of ${list.length} files ${verb}: ${someOf(others)}`);
    return;
  }
  if (list.length === 0) return onRefused(`There is no photo in the ${source}`, FORMATS);
  const [name] = others;
  onRefused(`“${name}” is not a photo`, FORMATS);
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
  acceptDrops((isOver) => document.body.classList.toggle("dragging", isOver), (files) => judge(files, handlers, "drop"));
  acceptPastes(handlers);
  acceptPicks(elements.file, handlers);
  acceptPicks(elements.photo, handlers);
  elements.pick.addEventListener("click", () => elements.file.click());
  elements.drop.addEventListener("click", (event) => {
    if (!event.target.closest("button, input, .query")) elements.file.click();
  });
}

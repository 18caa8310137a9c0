// The last searches with thumbnails, stored only in this browser, up to LIMIT.

import { element, ui } from "../shared/dom.js";
import { ago } from "../shared/format.js";
import { isShown } from "../shared/images.js";
import { stored } from "../shared/storage.js";

const LIMIT = 24;
const THUMB_PX = 224; // the input size of a model, so that an upload can be searched again
const QUALITY = 0.72;
const kept = stored("localStorage", "kinlens.searches");

function read() {
  try {
    const list = JSON.parse(kept.get() ?? "[]");
    return Array.isArray(list) ? list.filter((entry) => typeof entry?.hash === "string") : [];
  } catch {
    return [];
  }
}

// If the storage is full, the older half is dropped until the rest fits.
function write(list) {
  for (let count = list.length; count > 0; count = Math.floor(count / 2)) {
    if (kept.set(JSON.stringify(list.slice(0, count)))) return;
  }
  kept.set(JSON.stringify(list));
}

function thumbnail(image) {
  const scale = Math.min(THUMB_PX / Math.max(image.naturalWidth, image.naturalHeight), 1);
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(Math.round(image.naturalWidth * scale), 1);
  canvas.height = Math.max(Math.round(image.naturalHeight * scale), 1);
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}

function keep(entry) {
  const isSame = (other) =>
    other.name === entry.name && other.kind === entry.kind && other.thumb === entry.thumb;
  const others = read().filter((other) => other.time !== entry.time && !isSame(other));
  write([entry, ...others].sort((one, other) => other.time - one.time).slice(0, LIMIT));
  if (ui["history-dialog"].open) show();
}

// Adds a search to the history. Its thumbnail is drawn from `image`, the <img> of the query, once loaded.
export async function remember(query, hash, image) {
  const entry = { hash, name: query.name, kind: query.kind, thumb: "", time: Date.now() };
  keep(entry);
  try {
    if (!(await isShown(image, query.preview))) return;
    entry.thumb = thumbnail(image);
  } catch {
    return; // the browser cannot show this format: the entry has only a name
  }
  const isKept = read().some(({ time }) => time === entry.time); // the user may have cleared the history
  if (isKept) keep(entry);
}

// The thumbnail of a past search as a file. The content security policy forbids fetch() of data: URLs.
export function fileOf({ thumb, name }) {
  const bytes = Uint8Array.from(atob(thumb.split(",")[1] ?? ""), (letter) => letter.charCodeAt(0));
  return new File([bytes], name, { type: "image/jpeg" });
}

let onOpen = () => {};

function row(entry) {
  const image = entry.thumb.startsWith("data:image/jpeg;base64,")
    ? element("img", { src: entry.thumb, alt: "", className: "history-thumb" })
    : element("span", { className: "history-thumb" });
  const words = element("span", { className: "history-words" });
  words.append(
    element("span", { className: "history-name", textContent: entry.name }),
    element("span", { className: "hint", textContent: ago(entry.time) }),
  );
  const button = element("button", { type: "button", className: "history-open", testid: "history-entry" }, image, words);
  button.addEventListener("click", () => {
    ui["history-dialog"].close();
    onOpen(entry);
  });
  return element("li", {}, button);
}

function show() {
  const list = read();
  ui["history-text"].textContent = list.length > 0
    ? "Stored only in this browser, with small copies of the photos."
    : "No searches yet. Your searches appear here. They are stored only in this browser.";
  ui["history-list"].replaceChildren(...list.map(row));
  ui["history-clear"].hidden = list.length === 0;
}

// whenOpened(entry) with {hash, name, kind, thumb, time}.
export function startRecent(whenOpened) {
  onOpen = whenOpened;
  ui["history-open"].addEventListener("click", () => {
    show();
    ui["history-dialog"].showModal();
  });
  ui["history-close"].addEventListener("click", () => ui["history-dialog"].close());
  ui["history-clear"].addEventListener("click", () => {
    kept.set(null);
    show();
    ui["history-close"].focus();
  });
  ui["history-dialog"].addEventListener("click", (event) => {
    if (event.target === ui["history-dialog"]) ui["history-dialog"].close(); // the backdrop
  });
}

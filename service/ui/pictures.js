// Pictures of items. An <img> sends no API key, so with a key they are fetched when they come near.

import { fetchImage } from "/ui/api.js";
import { getKey } from "/ui/key.js";

const NEAR = "400px";

async function load(image) {
  try {
    const url = URL.createObjectURL(await fetchImage(image.dataset.link));
    image.addEventListener("load", () => URL.revokeObjectURL(url), { once: true });
    image.src = url;
  } catch {
    image.dispatchEvent(new Event("error"));
  }
}

const watcher = new IntersectionObserver(
  (entries) => {
    for (const { target } of entries.filter(({ isIntersecting }) => isIntersecting)) {
      watcher.unobserve(target);
      load(target);
    }
  },
  { rootMargin: NEAR },
);

export function showPicture(image, link) {
  image.classList.remove("broken");
  image.dataset.link = link;
  const isLocal = /^(blob|data):/.test(link);
  if (isLocal || !getKey()) image.src = link;
  else watcher.observe(image);
}

// An <img> that shows where it could not load; `link` comes from the service.
export function pictureOf(link, alt) {
  const image = Object.assign(document.createElement("img"), {
    loading: "lazy",
    decoding: "async",
    alt,
  });
  image.addEventListener("error", () => image.classList.add("broken"));
  showPicture(image, link);
  return image;
}

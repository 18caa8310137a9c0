// Images of items. An <img> sends no API key, so with a key they are fetched when they scroll near.

import { fetchImage } from "/ui/shared/api.js";
import { getKey } from "/ui/shared/key.js";

const NEAR = "400px";

// Drops an image that arrives after its <img> was removed or got another link.
async function load(image) {
  const { link } = image.dataset;
  const blob = await fetchImage(link).catch(() => null);
  if (image.dataset.link !== link || !image.isConnected) return;
  if (blob === null) return image.dispatchEvent(new Event("error"));
  const url = URL.createObjectURL(blob);
  for (const end of ["load", "error"]) {
    image.addEventListener(end, () => URL.revokeObjectURL(url), { once: true });
  }
  image.loading = "eager"; // a lazy <img> that is removed now fires neither load nor error
  image.src = url;
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

export function showImage(image, link) {
  image.classList.remove("broken");
  image.dataset.link = link;
  const isLocal = /^(blob|data):/.test(link);
  watcher.unobserve(image);
  if (isLocal || !getKey()) {
    image.src = link;
    return;
  }
  image.removeAttribute("src"); // it still shows the previous link
  watcher.observe(image);
}

// Waits until the <img> shows `link`. Resolves to false if it cannot, or has another link by then.
export async function isShown(image, link) {
  if (image.dataset.link !== link) return false;
  if (!image.hasAttribute("src")) {
    await new Promise((resolve) => {
      for (const end of ["load", "error"]) image.addEventListener(end, resolve, { once: true });
    });
  }
  if (image.dataset.link !== link) return false;
  await image.decode();
  return image.dataset.link === link && image.naturalWidth > 0;
}

// An <img> that gets the class `broken` if it cannot load. `link` comes from the service.
export function imageOf(link, alt) {
  const image = Object.assign(document.createElement("img"), {
    loading: "lazy",
    decoding: "async",
    alt,
  });
  image.addEventListener("error", () => image.classList.add("broken"));
  showImage(image, link);
  return image;
}

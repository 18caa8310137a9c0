// Images of items, as thumbnails. An <img> sends no API key, so with a key they are fetched when they
// scroll near.

import { fetchImage } from "./api.js";
import { getKey } from "./key.js";

const NEAR = "400px";

// The longest sides in pixels for an <img>, on a plain and on a dense screen. The service offers these sizes.
export const SMALL = [160, 320];
export const CARD = [320, 480];
export const LARGE = [320, 640];

// Images of the page itself, and those that an item has at another site: neither has sizes, or needs a key.
const isWhole = (link) => /^(blob|data|https?):/i.test(link);

// The address of the image of a hit or item.
export const linkOf = ({ image, image_url: elsewhere }) => elsewhere ?? image;

// The address of the image scaled to `side_px`. Other parameters of the address stay.
function scaled(link, side_px) {
  const url = new URL(link, location.href);
  url.searchParams.set("size", side_px);
  return url.href;
}

// Drops an image that arrives after its <img> was removed or got another link.
async function load(image) {
  const { link, sides } = image.dataset;
  const [plain, dense] = sides.split(",");
  const blob = await fetchImage(scaled(link, devicePixelRatio > 1 ? dense : plain)).catch(() => null);
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

// `sides` is SMALL, CARD or LARGE.
export function showImage(image, link, sides) {
  const [plain, dense] = sides;
  image.classList.remove("broken");
  Object.assign(image.dataset, { link, sides });
  watcher.unobserve(image);
  for (const name of ["src", "srcset"]) image.removeAttribute(name); // they still show the previous link
  if (isWhole(link)) image.src = link;
  else if (getKey()) watcher.observe(image);
  else Object.assign(image, { srcset: `${scaled(link, plain)} 1x, ${scaled(link, dense)} 2x`, src: scaled(link, plain) });
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
export function imageOf(link, alt, sides = SMALL) {
  const [side] = sides;
  const image = Object.assign(document.createElement("img"), {
    loading: "lazy",
    decoding: "async",
    width: side, // with the height it reserves a square; the style sheets set the size
    height: side,
    alt,
  });
  image.addEventListener("error", () => image.classList.add("broken"));
  showImage(image, link, sides);
  return image;
}

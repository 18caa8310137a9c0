// What went wrong, in words for the visitors of a shop. The sentences of the service are for its
// operator and for programs.

import { Problem } from "../shared/api.js";

const AGAIN = "Please try again in a moment.";
const PHOTO = "Use a JPEG, PNG, WebP, AVIF, GIF, BMP or TIFF photo.";
const BUSY = ["Many people are searching", AGAIN];
const LARGE = ["This photo is too large", "Use a smaller photo, for example a screenshot of it."];
const KEY = "Enter the key that you got from the shop.";

// By the kind of problem that the service names.
const BY_KIND = {
  "unsupported-format": ["This file is not a photo that can be read here", PHOTO],
  "corrupt-image": ["This photo is damaged", "Take it again, or choose another one."],
  "empty-image": ["This photo is empty", "Take it again, or choose another one."],
  "image-too-many-bytes": LARGE,
  "image-too-large": LARGE,
  "body-too-large": LARGE,
  "image-too-costly": LARGE,
  "unknown-gallery": ["This gallery is not here now", "It may be being changed. Reload the page in a moment."],
  "gallery-busy": ["The items are being changed", AGAIN],
  "gallery-unavailable": ["The items cannot be searched now", AGAIN],
  "unknown-item": ["This item is no longer here", "Search again to see what is."],
  "invalid-filter": ["These filters do not fit this gallery", "Remove them, then search again."],
  "key-needed": ["This search needs a key", KEY],
};

const BY_STATUS = {
  401: BY_KIND["key-needed"],
  403: ["This key does not open this search", KEY],
  404: ["This is no longer here", "Search again to see what is."],
  408: ["The photo took too long to arrive", "Check your connection, then try again."],
  413: LARGE,
  415: BY_KIND["unsupported-format"],
  429: ["You have searched a lot in a short time", "Please wait a moment, then try again."],
  503: BUSY,
};

const OTHER = ["Something went wrong", `${AGAIN} If it happens again, tell the shop the number in the details.`];

// A problem of the service in these words. Problems that the page itself states keep theirs.
export function worded(problem) {
  const { title, detail, ...facts } = problem;
  if (!facts.status) return problem;
  const kind = facts.body?.type?.split(":").at(-1);
  const words = BY_KIND[kind] ?? BY_STATUS[facts.status] ?? OTHER;
  return new Problem(...words, facts);
}

// The HTTP interface of the service: every failure is thrown as a Problem (RFC 9457).
// Paths are relative to the page, so they also work behind a proxy that adds a prefix.

import { getKey } from "./key.js";
import { cropText } from "./link.js";

export class Problem extends Error {
  constructor(title, detail, facts = {}) {
    super(`${title}: ${detail}`);
    this.name = "Problem";
    const unknown = { status: 0, requestId: "", canRetry: false, retryAfter_s: 0, body: null };
    Object.assign(this, unknown, facts, { title, detail });
  }

  get needsKey() {
    return this.status === 401 || this.status === 403;
  }
}

const RETRYABLE_STATUS = new Set([408, 429, 500, 502, 503, 504]);
const NO_REASON = "The service gave no further explanation.";
const LONGEST_WAIT_S = 3600;
const VARIED = 0.2; // diversity of a varied order

// Retry-After in whole seconds, given as seconds or as a date; 0 without one.
function retryAfter(response) {
  const given = response.headers.get("retry-after");
  if (given === null) return 0;
  const seconds = /^\d+$/.test(given) ? Number(given) : (Date.parse(given) - Date.now()) / 1e3;
  return Math.min(Math.max(Math.ceil(seconds) || 0, 0), LONGEST_WAIT_S);
}

async function problemOf(response) {
  const type = response.headers.get("content-type") ?? "";
  const body = type.includes("json") ? await response.json().catch(() => null) : null;
  return new Problem(
    body?.title ?? `The request failed (${response.status})`,
    typeof body?.detail === "string" ? body.detail : NO_REASON,
    {
      status: response.status,
      requestId: body?.request_id ?? response.headers.get("x-request-id") ?? "",
      canRetry: RETRYABLE_STATUS.has(response.status),
      retryAfter_s: retryAfter(response),
      body,
    },
  );
}

function unreachable(error) {
  if (error.name === "AbortError") return error;
  const offline = navigator.onLine === false;
  return new Problem(
    offline ? "You are offline" : "There is no connection",
    offline ? "Connect to the network, then try again." : "Check your connection, then try again in a moment.",
    { canRetry: true },
  );
}

// fetch with the key of this tab. Throws: Problem, AbortError.
export async function request(url, { headers = {}, ...options } = {}) {
  const key = getKey();
  const all = { accept: "application/json", ...(key && { authorization: `Bearer ${key}` }), ...headers };
  let response;
  try {
    response = await fetch(url, { ...options, headers: all });
  } catch (error) {
    throw unreachable(error);
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

BigInt.prototype.toJSON = function toJSON() {
  return JSON.rawJSON(String(this));
};

// Integers that a number of JavaScript cannot hold, such as long codes, become a BigInt.
export const parsed = (text) => JSON.parse(text, (_, value, context) =>
  Number.isInteger(value) && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source) ? BigInt(context.source) : value);

export async function bodyOf(response, kind = "json") {
  let body;
  try {
    body = kind === "json" ? await response.text() : await response[kind]();
  } catch (error) {
    throw unreachable(error);
  }
  return kind === "json" ? parsed(body) : body;
}

export const getJson = async (url, options) => bodyOf(await request(url, options));

export const sendJson = (method, url, content, signal) =>
  request(url, {
    method,
    signal,
    body: JSON.stringify(content),
    headers: { "content-type": "application/json" },
  });

// Sends feedback on a hit. `action` is clicked or wrong; `image` is the query image, or null.
export function postFeedback(answerId, item, action, image) {
  const form = new FormData();
  for (const [name, text] of Object.entries({ answer_id: answerId, item, action })) form.append(name, text);
  if (image) form.append("image", image, "query");
  return request("feedback", { method: "POST", body: form });
}

export const galleryPath = (name) => `galleries/${encodeURIComponent(name)}`;

export const listGalleries = async () => (await getJson("galleries")).galleries;

export const describeGallery = (name) => getJson(galleryPath(name));

export const getItem = (gallery, id) => getJson(`${galleryPath(gallery)}/items/${id}`);

export function listItems(gallery, { offset = 0, limit = 20, prefix = "", filter = null, facets = [] } = {}, signal) {
  const query = new URLSearchParams({ offset, limit });
  if (prefix) query.set("key_prefix", prefix);
  if (filter) query.set("filter", typeof filter === "string" ? filter : JSON.stringify(filter));
  if (facets.length > 0) query.set("facets", JSON.stringify(facets));
  return getJson(`${galleryPath(gallery)}/items?${query}`, { signal });
}

export async function fetchImage(link, signal) {
  return bodyOf(await request(link, { signal, headers: { accept: "image/*" } }), "blob");
}

// The parameters that all searches share, as [name, text].
function commonFields({ k, filter, groupBy, groupSize, order, minScore, facets, guarantee, accept }) {
  const fields = [["k", k]];
  if (filter && Object.keys(filter).length > 0) fields.push(["filter", JSON.stringify(filter)]);
  if (groupBy) fields.push(["group_by", groupBy], ["group_size", groupSize]);
  if (order) fields.push(["diversity", VARIED]);
  if (minScore !== undefined) fields.push(["min_score", minScore]);
  if (facets) fields.push(["facets", JSON.stringify(facets)]);
  if (guarantee) fields.push(["guarantee", guarantee]);
  if (accept) fields.push(["accept", accept]);
  return fields;
}

async function answerOf(response) {
  const answer = await bodyOf(response);
  return { ...answer, requestId: response.headers.get("x-request-id") ?? "" };
}

// The items most similar to an item of the gallery, without that item.
export async function getSimilar(gallery, id, wanted, signal) {
  const query = new URLSearchParams(commonFields(wanted));
  return answerOf(await request(`${galleryPath(gallery)}/items/${id}/similar?${query}`, { signal }));
}

function searchForm({ images = [], crops = [], text, combine, gallery, positives = [], negatives = [], ...common }) {
  const form = new FormData();
  for (const image of images) form.append("image", image, "query");
  if (text) form.append("texts", JSON.stringify([text]));
  if (combine) form.append("combine", combine);
  if (gallery) form.append("gallery", gallery);
  for (const crop of crops) form.append("crop", cropText(crop));
  for (const key of positives) form.append("positive", key);
  for (const key of negatives) form.append("negative", key);
  for (const [field, value] of commonFields(common)) form.append(field, String(value));
  return form;
}

// A search by uploaded images or parts of one image, words, and liked and disliked items.
export async function postSearch(wanted, signal) {
  return answerOf(await request("search", { method: "POST", body: searchForm(wanted), signal }));
}

// The parts of an image in which the detector of a gallery's model found something: [{box, score, label}].
export async function findBoxes(gallery, image, signal) {
  const body = new FormData();
  body.append("image", image, "query");
  body.append("gallery", gallery);
  const { boxes } = await bodyOf(await request("boxes", { method: "POST", body, signal }));
  return boxes;
}

// The share of the score that each region of the hit and of the query contributes.
export const explainHit = (gallery, id, wanted, signal) =>
  getJson(`${galleryPath(gallery)}/items/${id}/explain`, { method: "POST", body: searchForm(wanted), signal });

// The requests of the admin page that the search page does not send.

import { bodyOf, fetchImage, galleryPath, getJson, Problem, request, sendJson } from "../shared/api.js";

const sent = async (method, url, content, signal) => bodyOf(await sendJson(method, url, content, signal));

// What the key of this tab may do: {key, scopes, galleries, filter}.
export const getAccess = () => getJson("access");

// Resolves to the reason why there are no jobs, or "".
export async function findNoJobs() {
  try {
    await getJson("jobs?limit=1");
    return "";
  } catch (error) {
    if (error instanceof Problem && error.status === 409) return error.detail;
    throw error;
  }
}

// The checks of readiness come with status 200 and with 503.
export async function getReady() {
  try {
    return await getJson("ready");
  } catch (error) {
    if (error instanceof Problem && error.body?.checks) return error.body;
    throw error;
  }
}

export const createGallery = (name, bundleId) =>
  sent("POST", "galleries", { name, bundle_id: bundleId || null });

export const deleteGallery = (name) => request(galleryPath(name), { method: "DELETE" });

// entries: [{key, file, attributes}]. Resolves to the result of each, in their order.
export async function putItems(gallery, entries, signal) {
  const form = new FormData();
  for (const { key, file, attributes } of entries) {
    form.append("image", file, file.name);
    form.append("key", key);
    // null keeps the attributes of an existing item with this key.
    form.append("attributes", Object.keys(attributes).length > 0 ? JSON.stringify(attributes) : "null");
  }
  return bodyOf(await request(`${galleryPath(gallery)}/items`, { method: "PUT", body: form, signal }));
}

// changes: {key: {attribute: value or null}}.
export const patchItems = (gallery, changes) =>
  sent("PATCH", `${galleryPath(gallery)}/items`, { changes });

// which: {keys} or {filter}. {keys, keep} fails if no item of `keep` exists. Resolves to
// {removed, version}.
export const deleteItems = (gallery, which) =>
  sent("POST", `${galleryPath(gallery)}/items/delete`, which);

export const restoreItems = (gallery, keys) =>
  sent("POST", `${galleryPath(gallery)}/items/restore`, { keys });

export const listKeys = async () => (await getJson("keys")).keys;

// wanted: {name, scopes, galleries, filter, rate, expires_days}. Resolves to {text, key}.
export const createKey = (wanted) => sent("POST", "keys", wanted);

export const rotateKey = (name) => sent("POST", `keys/${encodeURIComponent(name)}/rotate`, {});

export const revokeKey = (name) => request(`keys/${encodeURIComponent(name)}`, { method: "DELETE" });

// The entries of the audit log before the number `before`, newest first.
export const listAudit = async (limit, before) =>
  (await getJson(`audit?${new URLSearchParams({ limit, ...(before && { before }) })}`)).entries;

export const listGolden = async (gallery) => (await getJson(`${galleryPath(gallery)}/golden`)).queries;

export const listGoldenRuns = async (gallery) => (await getJson(`${galleryPath(gallery)}/golden/runs`)).runs;

export const runGolden = (gallery) => request(`${galleryPath(gallery)}/golden/run`, { method: "POST" });

// A stored query of a visitor: {left, sha256, text, product}; its sha256 is null if none is left.
export const drawQuery = (gallery) => getJson(`${galleryPath(gallery)}/golden/unlabelled`);

export const getQueryPhoto = (gallery, sha256) => fetchImage(`${galleryPath(gallery)}/golden/unlabelled/${sha256}`);

// It is not drawn again. Throws: Problem with status 404 if a colleague was faster.
export const skipQuery = (gallery, sha256) =>
  request(`${galleryPath(gallery)}/golden/unlabelled/${sha256}`, { method: "DELETE" });

export const unskipQuery = (gallery, sha256) =>
  request(`${galleryPath(gallery)}/golden/unlabelled/${sha256}`, { method: "PUT" });

// Resolves to the labelled query. `image` or `text` is null.
export async function addGolden(gallery, image, text, label) {
  const form = new FormData();
  if (image) form.append("image", image, "query");
  if (text) form.append("texts", JSON.stringify([text]));
  form.append("label", JSON.stringify(label));
  return bodyOf(await request(`${galleryPath(gallery)}/golden`, { method: "POST", body: form }));
}

export const removeGolden = (gallery, sha256) =>
  request(`${galleryPath(gallery)}/golden/${sha256}`, { method: "DELETE" });

// wanted: {min_score} or none, and limit. Resolves to groups of near-duplicates.
export const findDuplicates = (gallery, wanted) =>
  getJson(`${galleryPath(gallery)}/duplicates?${new URLSearchParams(wanted)}`);

export const listJobs = async (limit) => (await getJson(`jobs?limit=${limit}`)).jobs;

// The training jobs, data sets, weights and bundles that a job can name.
export const getJobOptions = () => getJson("jobs/options");

export const getLog = (id, offset) => getJson(`jobs/${id}/log?offset=${offset}`);

// what: cancel, swap or resume.
export const changeJob = async (id, what) => bodyOf(await request(`jobs/${id}/${what}`, { method: "POST" }));

export const getFeedback = (gallery) => getJson(`${galleryPath(gallery)}/feedback?format=json`);

// kind: compact, swap, sync or rebuild of a gallery, or train.
export function startJob(kind, gallery, params) {
  if (kind === "train") return sent("POST", "jobs/train", { ...params, gallery });
  return sent("POST", `${galleryPath(gallery)}/${kind}`, params);
}

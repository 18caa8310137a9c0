// The HTTP interface of the service: every failure is thrown as a Problem (RFC 9457).

export class Problem extends Error {
  constructor(title, detail, { requestId = "", canRetry = false } = {}) {
    super(`${title}: ${detail}`);
    this.name = "Problem";
    Object.assign(this, { title, detail, requestId, canRetry });
  }
}

const RETRYABLE_STATUS = new Set([408, 429, 500, 502, 503, 504]);

async function problemOf(response) {
  const type = response.headers.get("content-type") ?? "";
  const body = type.includes("json") ? await response.json().catch(() => ({})) : {};
  const wait = response.headers.get("retry-after");
  const fallback = "The service gave no further explanation.";
  const detail = typeof body.detail === "string" ? body.detail : fallback;
  return new Problem(
    body.title ?? `The search failed (${response.status})`,
    wait ? `${detail} Wait ${wait} s before the next try.` : detail,
    {
      requestId: body.request_id ?? response.headers.get("x-request-id") ?? "",
      canRetry: RETRYABLE_STATUS.has(response.status),
    },
  );
}

function unreachable(error) {
  if (error.name === "AbortError") return error;
  return new Problem(
    "The service cannot be reached",
    "Check that you are online and that the service is running, then try again.",
    { canRetry: true },
  );
}

async function checked(url, options) {
  let response;
  try {
    response = await fetch(url, options);
  } catch (error) {
    throw unreachable(error);
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function body(response, kind) {
  try {
    return await response[kind]();
  } catch (error) {
    throw unreachable(error);
  }
}

export async function listGalleries() {
  const response = await checked("/galleries", { headers: { accept: "application/json" } });
  return (await body(response, "json")).galleries;
}

export async function fetchImage(link, signal) {
  return body(await checked(link, { signal }), "blob");
}

export async function postSearch({ image, name, k, gallery }, signal) {
  const form = new FormData();
  form.append("image", image, name);
  form.append("k", String(k));
  if (gallery) form.append("gallery", gallery);
  const response = await checked("/search", { method: "POST", body: form, signal });
  const answer = await body(response, "json");
  return { ...answer, requestId: response.headers.get("x-request-id") ?? "" };
}

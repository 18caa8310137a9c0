// Sends pictures in small requests: several at once, so that each costs little, and few, so that
// progress is seen and a refusal concerns few.

import { putItems } from "/ui/admin/api.js";
import { problemOf } from "/ui/shared/alerts.js";

const MOST_FILES = 8;
const MOST_BYTES = 8 * 2 ** 20;
const TRIES = 4;
const SECOND_MS = 1000;

function* parcels(entries) {
  let parcel = [];
  let bytes = 0;
  for (const entry of entries) {
    const isFull = parcel.length === MOST_FILES || bytes + entry.file.size > MOST_BYTES;
    if (parcel.length > 0 && isFull) {
      yield parcel;
      [parcel, bytes] = [[], 0];
    }
    parcel.push(entry);
    bytes += entry.file.size;
  }
  if (parcel.length > 0) yield parcel;
}

function pause(wait_ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, wait_ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}

// A busy service is asked again after the time that it names.
async function patiently(work, signal) {
  for (let attempt = 1; ; attempt += 1) {
    try {
      return await work();
    } catch (error) {
      if (error?.name === "AbortError") throw error;
      const problem = problemOf(error);
      if (!problem.canRetry || attempt === TRIES) throw problem;
      await pause(Math.max(problem.retryAfter_s, attempt) * SECOND_MS, signal);
    }
  }
}

async function sendParcel(gallery, parcel, signal) {
  try {
    const { items } = await patiently(() => putItems(gallery, parcel, signal), signal);
    items.forEach(({ status, problem }, place) => {
      Object.assign(parcel[place], { state: status, note: problem?.detail ?? "" });
    });
  } catch (error) {
    if (error?.name === "AbortError" || problemOf(error).needsKey) throw error;
    for (const entry of parcel) Object.assign(entry, { state: "failed", note: problemOf(error).detail });
  }
}

// Each entry, {key, file, attributes}, gets its `state` and `note`; onChange(entries) after each
// change. Throws: AbortError, Problem with `needsKey`.
export async function sendAll(gallery, entries, onChange, signal) {
  for (const parcel of parcels(entries)) {
    signal.throwIfAborted();
    for (const entry of parcel) entry.state = "sending";
    onChange(parcel);
    await sendParcel(gallery, parcel, signal);
    onChange(parcel);
  }
}

// Sends images in small batches: the images of a batch share the cost of a request, and a small batch
// keeps the progress visible and limits the effect of a refusal.

import { putItems } from "./api.js";
import { problemOf } from "../shared/alerts.js";
import { withRetries } from "../shared/retries.js";

const MOST_FILES = 8;
const MOST_BYTES = 8 * 2 ** 20;
const TRIES = 4;

function* batches(entries) {
  let batch = [];
  let bytes = 0;
  for (const entry of entries) {
    const isFull = batch.length === MOST_FILES || bytes + entry.file.size > MOST_BYTES;
    if (batch.length > 0 && isFull) {
      yield batch;
      [batch, bytes] = [[], 0];
    }
    batch.push(entry);
    bytes += entry.file.size;
  }
  if (batch.length > 0) yield batch;
}

const waitOf = ({ canRetry, retryAfter_s }, attempt) => (canRetry ? Math.max(retryAfter_s, attempt) : 0);

async function sendBatch(gallery, batch, signal) {
  try {
    const { items } = await withRetries(() => putItems(gallery, batch, signal), TRIES, waitOf, signal);
    items.forEach(({ status, problem }, index) => {
      Object.assign(batch[index], { state: status, note: problem?.detail ?? "" });
    });
  } catch (error) {
    if (error?.name === "AbortError" || problemOf(error).needsKey) throw error;
    for (const entry of batch) Object.assign(entry, { state: "failed", note: problemOf(error).detail });
  }
}

// Sets `state` and `note` of each entry {key, file, attributes} and calls onChange(entries) after each
// change. Throws: AbortError, Problem with `needsKey`.
export async function sendAll(gallery, entries, onChange, signal) {
  for (const batch of batches(entries)) {
    signal.throwIfAborted();
    for (const entry of batch) entry.state = "sending";
    onChange(batch);
    await sendBatch(gallery, batch, signal);
    onChange(batch);
  }
}

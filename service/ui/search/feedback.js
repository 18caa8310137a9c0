// Sends votes as feedback if the operator enabled it: which items were right for a query.

import * as settings from "./settings.js";
import { postFeedback } from "../shared/api.js";

const ACTIONS = { like: "clicked", dislike: "wrong" };

// The query image to send, or null. Only uploads are sent: the service already has the images of items.
function queryImage(query) {
  if (settings.facts().feedback !== "pictures") return null;
  return query.kind === "upload" ? query.image : null;
}

// Sent once, in the background. A failure is ignored, since it does not affect the search.
export async function sendVote(kind, hit, { query, answer }) {
  if (!answer.answer_id) return;
  try {
    await postFeedback(answer.answer_id, hit.key, ACTIONS[kind], queryImage(query));
  } catch {
    // ignored on purpose
  }
}

// Votes as feedback, where the operator wants it: which items were right for what was searched with.

import * as settings from "/ui/search/settings.js";
import { postFeedback } from "/ui/shared/api.js";

const ACTIONS = { like: "clicked", dislike: "wrong" };

// Only an upload is a picture of its own; an item is known by its key.
function pictureOf(query) {
  if (settings.facts().feedback !== "pictures") return null;
  return query.kind === "upload" ? query.image : null;
}

// In the background and once: a vote that is not taken is no reason to disturb.
export async function sendVote(kind, hit, { query, answer }) {
  if (!answer.answer_id) return;
  try {
    await postFeedback(answer.answer_id, hit.key, ACTIONS[kind], pictureOf(query));
  } catch {
    // the search goes on without it
  }
}

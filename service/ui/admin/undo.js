// Reports that items were deleted, with a button that restores them.

import { restoreItems } from "./api.js";
import { whileBusy } from "./work.js";
import { showNotice } from "../shared/alerts.js";
import { smallButton } from "../shared/dom.js";
import { grouped, plural } from "../shared/format.js";

export const UNDO_TEXT = "This can be undone for a day, or until you compact the gallery.";

async function restore(name, keys) {
  const { restored } = await restoreItems(name, keys);
  const missing = keys.length - restored;
  showNotice(
    missing === 0
      ? `${plural(restored, "item")} restored.`
      : `${plural(restored, "item")} restored, ${grouped(missing)} not: the key is in use again, or the gallery was compacted.`,
  );
}

// whenBack() is called after items of the gallery `name` were restored.
export function offerUndo(text, name, keys, whenBack) {
  const undo = (button) => whileBusy(button, async () => {
    await restore(name, keys);
    await whenBack();
  });
  showNotice(text, smallButton("Undo", { testid: "undo", className: "notice-action" }, undo));
}

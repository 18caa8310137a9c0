// API keys: list, create, rotate, revoke. The secret of a new key is shown once.

import { createKey, listKeys, revokeKey, rotateKey } from "./api.js";
import { confirmed } from "./confirm.js";
import { state } from "./state.js";
import { moment } from "./status.js";
import { reportIn, whileBusy } from "./work.js";
import { showNotice } from "../shared/alerts.js";
import { announce, element, onSubmit, optionsOf, smallButton, ui } from "../shared/dom.js";

const STATE_CLASSES = { active: "good", expired: "attention", revoked: "plain" };

function showSecret(title, text) {
  ui["secret-title"].textContent = title;
  ui["secret-text"].textContent = text;
  ui.secret.hidden = false;
  ui.secret.focus();
}

function hideSecret() {
  ui["secret-text"].textContent = "";
  ui.secret.hidden = true;
}

async function copySecret() {
  try {
    await navigator.clipboard.writeText(ui["secret-text"].textContent);
    announce("Copied");
    ui["secret-copy"].textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(ui["secret-text"]);
  }
}

function notesOf({ scopes, galleries, filter, rate, created_at: created, expires_at: expires, old_until: oldUntil }) {
  return [
    scopes.join(", "),
    galleries === null ? "all galleries" : `only ${galleries.join(", ")}`,
    ...(filter === null ? [] : [`items with ${filter}`]),
    ...(rate === null ? [] : [rate === "" ? "no rate limit" : rate]),
    `created ${moment(created)}`,
    ...(expires === null ? [] : [`expires ${moment(expires)}`]),
    ...(oldUntil === null ? [] : [`the old secret works until ${moment(oldUntil)}`]),
  ];
}

async function rotate({ name }, button) {
  const isSure = await confirmed({
    title: `Give ${name} a new secret?`,
    text: "The old secret works for another day, so that you can replace it where it is used.",
    action: "New secret",
  });
  if (!isSure) return;
  await whileBusy(button, async () => {
    const { text } = await rotateKey(name);
    await showKeys();
    showSecret(`The new secret of ${name}`, text);
  });
}

async function revoke({ name }, button) {
  const isSure = await confirmed({
    title: `Revoke ${name}?`,
    text: "Whoever uses it is refused within a second. This cannot be undone.",
    action: "Revoke",
  });
  if (!isSure) return;
  await whileBusy(button, async () => {
    await revokeKey(name);
    await showKeys();
    showNotice(`${name} was revoked.`);
    ui["keys-title"].focus();
  });
}

function rowOf(key) {
  const head = element("h2", { textContent: key.name });
  const badge = element("span", { className: `state verdict ${STATE_CLASSES[key.state]}`, textContent: key.state });
  const text = element("div", { className: "gallery-text" }, head, element("p", { className: "hint", textContent: notesOf(key).join(" · ") }));
  const buttons = key.state !== "active" ? [] : [
    smallButton("New secret", { about: key.name, testid: "key-rotate" }, (button) => rotate(key, button)),
    smallButton("Revoke", { about: key.name, testid: "key-revoke", className: "danger" }, (button) => revoke(key, button)),
  ];
  const row = element("li", { className: "panel-box gallery-row" }, text, badge, ...buttons);
  Object.assign(row.dataset, { testid: "key-row", name: key.name });
  return row;
}

export async function showKeys() {
  const keys = await listKeys();
  ui["key-list"].replaceChildren(...keys.map(rowOf));
  ui["keys-empty"].hidden = keys.length > 0;
  const before = [...ui["key-galleries"].selectedOptions].map(({ value }) => value);
  ui["key-galleries"].replaceChildren(...optionsOf(state.galleries.map(({ name }) => [name, name])));
  for (const option of ui["key-galleries"].options) option.selected = before.includes(option.value);
}

// The fields that are filled in; the service uses its defaults for the others.
function read() {
  const data = new FormData(ui["new-key"]);
  const [galleries, days] = [data.getAll("galleries"), data.get("expires_days")];
  return {
    name: data.get("name"),
    scopes: data.getAll("scopes"),
    ...(galleries.length > 0 && { galleries }),
    ...(data.get("filter").trim() && { filter: data.get("filter").trim() }),
    ...(data.get("rate").trim() && { rate: data.get("rate").trim() }),
    ...(days && { expires_days: Number(days) }),
  };
}

async function create() {
  const { text, key } = await createKey(read());
  ui["new-key"].reset();
  await showKeys();
  showSecret(`The secret of ${key.name}`, text);
}

export function startKeys() {
  ui["secret-copy"].addEventListener("click", copySecret);
  ui["secret-close"].addEventListener("click", () => {
    hideSecret();
    ui["keys-title"].focus();
  });
  addEventListener("hashchange", hideSecret);
  onSubmit(ui["new-key"], ({ submitter }) =>
    whileBusy(submitter ?? ui["new-key"], create, reportIn(ui["new-key-error"])));
}

// Labels what visitors searched with: one stored query after the other, with the products that are found for it.
// A click on the right product stores the query in the golden set.

import { addGolden, drawQuery, getQueryPhoto, removeGolden, skipQuery, unskipQuery } from "./api.js";
import { describeChosen, state } from "./state.js";
import { whileBusy } from "./work.js";
import { postSearch } from "../shared/api.js";
import { announce, element, ui } from "../shared/dom.js";
import { grouped, valueText } from "../shared/format.js";
import { CARD, imageOf, linkOf } from "../shared/images.js";

const FEW = 9; // one for each digit
const MORE = 50; // as many as the service looks through for a guarantee
const OFF = "To label what visitors searched with, start the service with KINLENS_FEEDBACK=pictures. It then stores the photos of searches that visitors rate.";
const EMPTY = "No photo or text of a visitor is left to label. They come from searches whose results visitors like, dislike or click.";
const KEYS = { 0: "label-none", m: "label-more", s: "label-skip", u: "label-undo" };
let asked = null; // the shown query: {gallery, left, sha256, text, product, photo, isMine}
let last = null; // the query before it: {query, sha256} with the sha256 of its label, or "" if it was skipped
let turn = 0; // counts queries, so that slower work can detect that another one is shown
let onLabelled = () => {};

const isGone = ({ status }) => status === 404; // deleted, or labelled or skipped by a colleague

function ignoreGone(error) {
  if (!isGone(error)) throw error;
}

// Resolves to null for words. Throws: Problem with status 404 if it was deleted.
const photoOf = ({ gallery, sha256, text }) => (text === null ? getQueryPhoto(gallery, sha256) : null);

function showText(text) {
  asked = null;
  ui["label-hits"].replaceChildren();
  ui["label-left"].textContent = "";
  ui["label-undo"].hidden = last === null;
  ui["label-work"].hidden = true;
  ui["label-text"].hidden = false;
  ui["label-text"].textContent = text;
}

function showQuery() {
  const { text, photo, left } = asked;
  const link = photo === null ? "" : URL.createObjectURL(photo);
  const shown = photo === null ? element("p", { textContent: `“${text}”` }) : imageOf(link, "Photo of a visitor", CARD);
  shown.addEventListener("load", () => URL.revokeObjectURL(link), { once: true });
  ui["label-query"].replaceChildren(shown);
  ui["label-hits"].replaceChildren();
  ui["label-left"].textContent = `${grouped(left)} to label`;
  ui["label-undo"].hidden = last === null;
  ui["label-none"].disabled = true; // until the products are there to be looked at
  ui["label-more"].hidden = true;
  ui["label-text"].hidden = true;
  ui["label-work"].hidden = false;
}

function hitOf({ value, hits: [hit] }, index) {
  const { product } = asked;
  const isNamed = value !== null;
  const name = isNamed ? valueText(value) : hit.key;
  const label = isNamed ? { attribute: product, value } : { keys: [hit.key] };
  const number = index < FEW ? [element("kbd", { textContent: index + 1 })] : [];
  const image = imageOf(linkOf(hit), "", CARD);
  const button = element("button", { type: "button", className: "label-hit", testid: "label-hit" }, image, element("span", {}, ...number, name));
  button.addEventListener("click", () => act(() => store(label, name)));
  return element("li", {}, button);
}

async function search(k) {
  const mine = turn;
  const { gallery, text, photo, product } = asked;
  const images = photo === null ? [] : [photo];
  const { hits, groups } = await postSearch({ gallery, images, text, k, groupBy: product, groupSize: 1 });
  if (mine !== turn) return;
  const rows = groups ?? hits.map((hit) => ({ value: null, hits: [hit] }));
  ui["label-hits"].replaceChildren(...rows.map(hitOf));
  ui["label-none"].disabled = false;
  ui["label-more"].hidden = k === MORE || rows.length < k;
}

async function show(query) {
  turn += 1;
  const mine = turn;
  const photo = await photoOf(query);
  if (mine !== turn) return;
  asked = { ...query, photo };
  showQuery();
  await search(FEW);
}

async function next() {
  const gallery = state.name;
  const query = await drawQuery(gallery);
  if (gallery !== state.name) return;
  if (query.sha256 === null) return showText(EMPTY);
  await show({ gallery, ...query }).catch((error) => {
    if (asked?.sha256 !== query.sha256 && isGone(error)) return next();
    throw error;
  });
}

// One step at a time: a second click or key while one runs is ignored.
function act(step) {
  return whileBusy(ui["label-none"], async () => {
    ui["label-box"].ariaBusy = "true";
    try {
      await step();
    } finally {
      ui["label-box"].ariaBusy = "false";
    }
    ui["label-title"].focus();
  });
}

// Throws: Problem with status 404 if it is gone.
async function claim(query) {
  if (!query.isMine) await skipQuery(query.gallery, query.sha256);
  query.isMine = true;
}

async function release(query) {
  await unskipQuery(query.gallery, query.sha256);
  query.isMine = false;
}

// Claims the query before work(query) labels it: so no colleague labels it too, and none that was deleted is stored.
// What ends after another gallery was chosen must not count there.
async function finish(text, work) {
  const query = asked;
  const mine = turn;
  try {
    await claim(query);
  } catch (error) {
    ignoreGone(error);
    if (mine !== turn) return;
    await next();
    return announce("A colleague was faster, or that query was deleted.");
  }
  let sha256 = "";
  try {
    sha256 = await work(query);
  } catch (error) {
    await release(query);
    throw error;
  }
  if (mine !== turn) return;
  last = { query, sha256 };
  if (sha256) onLabelled(1);
  await next();
  announce(text);
}

const skip = () => finish("Skipped.", () => "");

const store = (label, name) =>
  finish(`Labelled as ${name}.`, async ({ gallery, photo, text }) => {
    const { sha256 } = await addGolden(gallery, photo, text, label);
    return sha256;
  });

async function undo() {
  const { query, sha256 } = last;
  const mine = turn;
  await release(query).catch(ignoreGone);
  if (sha256) await removeGolden(query.gallery, sha256).catch(ignoreGone);
  if (mine !== turn) return;
  if (sha256) onLabelled(-1);
  last = null;
  await show({ ...query, isMine: false }).catch(async (error) => {
    ignoreGone(error);
    await next();
  });
}

export async function loadLabels() {
  turn += 1;
  const mine = turn;
  last = null;
  const { feedback } = await describeChosen();
  if (mine !== turn) return;
  if (feedback === "pictures") await next();
  else showText(OFF);
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  const hit = ui["label-hits"].children[Number(event.key) - 1]?.firstChild;
  const button = hit ?? ui[KEYS[event.key.toLowerCase()]];
  if (!button?.checkVisibility()) return;
  event.preventDefault();
  button.click();
}

// whenLabelled(change) is called after the golden set got one query more (1) or less (-1).
export function startLabels(whenLabelled) {
  onLabelled = whenLabelled;
  ui["label-none"].addEventListener("click", () => act(() => store({ no_match: true }, "none of these")));
  ui["label-more"].addEventListener("click", () => act(() => search(MORE)));
  ui["label-skip"].addEventListener("click", () => act(skip));
  ui["label-undo"].addEventListener("click", () => act(undo));
  ui["label-box"].addEventListener("keydown", press);
}

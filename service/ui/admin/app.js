// The admin page: access, the current view and the chosen gallery.

import { startAdd, showAdd } from "./add.js";
import { findNoJobs, getAccess } from "./api.js";
import { showAudit, startAudit } from "./audit.js";
import { startConfirm } from "./confirm.js";
import { showDuplicates, startDuplicates } from "./duplicates.js";
import { startEdit } from "./edit.js";
import { showGalleries, startGalleries } from "./galleries.js";
import * as golden from "./golden.js";
import * as items from "./items.js";
import { follow, showJob, startJobs } from "./jobs.js";
import { showKeys, startKeys } from "./keys.js";
import { isStarting, showStarts, startStarts } from "./starts.js";
import { choose, chosen, loadGalleries, may, refreshSizes, state, whenGalleryChanges } from "./state.js";
import * as status from "./status.js";
import { close, failed, startWork } from "./work.js";
import { hideError, problemOf, showProblem, startAlerts } from "../shared/alerts.js";
import { optionsOf, startSkip, ui } from "../shared/dom.js";
import { plural } from "../shared/format.js";
import { getKey, setKey } from "../shared/key.js";

const VIEWS = {
  items: items.load,
  add: showAdd,
  duplicates: showDuplicates,
  status: status.load,
  golden: golden.load,
  jobs: () => Promise.all([showStarts(), follow()]),
  galleries: showGalleries,
  keys: showKeys,
  audit: showAudit,
};
let shown = "";

function wantedView() {
  const name = location.hash.slice(1);
  return Object.hasOwn(VIEWS, name) && may(name) ? name : shown || "items";
}

function showChooser() {
  ui.gallery.replaceChildren(...optionsOf(state.galleries.map(({ name }) => [name, name])));
  ui.gallery.value = state.name;
  ui["gallery-bar"].hidden = state.galleries.length === 0;
  const size = chosen()?.size;
  ui["gallery-size"].textContent = size === undefined ? "" : plural(size, "item");
}

async function showView() {
  if (document.body.dataset.access !== "open") return;
  const hasGallery = state.name !== "" || !may("galleries");
  const name = hasGallery || wantedView() !== "items" ? wantedView() : "galleries";
  const isOther = shown !== "" && shown !== name;
  shown = name;
  for (const view of document.querySelectorAll(".view")) view.hidden = view.dataset.view !== name;
  for (const link of ui.views.querySelectorAll("a")) {
    if (link.hash !== `#${name}`) link.removeAttribute("aria-current");
    else {
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ block: "nearest", inline: "nearest" }); // on a phone the views scroll sideways
    }
  }
  document.title = `${ui[`${name}-title`].textContent} · Kinlens admin`;
  if (isOther) {
    hideError(); // it is about the previous view
    ui[`${name}-title`].focus();
  }
  try {
    await VIEWS[name]();
  } catch (error) {
    failed(error, showView);
  }
}

async function refresh() {
  try {
    await refreshSizes();
    showChooser();
    if (shown === "galleries") await showGalleries();
  } catch (error) {
    failed(error);
  }
}

// A job may have changed the generation, model and size of the gallery.
async function afterJob() {
  await refresh();
  if (shown === "jobs" && !isStarting()) await showStarts().catch(failed);
}

// Throws: Problem with `needsKey` if the key of this tab has no rights here.
async function learnAccess() {
  state.access = await getAccess();
  // Without the right to change items, the service itself explains how to get a key.
  state.noJobs = may("jobs") || !may("items") ? await findNoJobs() : "";
  for (const link of ui.views.querySelectorAll("a")) link.hidden = !may(link.hash.slice(1));
}

async function enter() {
  const isFirst = document.body.dataset.access === "asking" && !getKey();
  try {
    await learnAccess();
    await loadGalleries();
  } catch (error) {
    const problem = problemOf(error);
    if (problem.needsKey) return close(problem, isFirst);
    document.body.dataset.access = "failed";
    return showProblem(problem, enter);
  }
  const isBack = document.body.dataset.access !== "asking";
  document.body.dataset.access = "open";
  hideError();
  ui.main.hidden = false;
  ui["forget-key"].hidden = getKey() === "";
  if (isBack) ui.main.focus();
  follow();
  await showView();
}

function forgetKey() {
  setKey("");
  location.reload();
}

whenGalleryChanges(() => {
  showChooser();
  items.reset();
  if (document.body.dataset.access === "open") showView();
});
startAlerts(ui.main);
startSkip(ui.main);
startWork(enter);
startConfirm();
startEdit();
items.startItems(refresh);
startAdd(refresh);
startDuplicates(refresh);
status.startStatus();
golden.startGolden();
startGalleries();
startKeys();
startAudit();
startJobs(afterJob);
startStarts(showJob);
ui.gallery.addEventListener("change", () => choose(ui.gallery.value));
ui["forget-key"].addEventListener("click", forgetKey);
addEventListener("hashchange", showView);
enter();

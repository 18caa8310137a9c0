// Creates elements and listens to them. Data from the service enters the page as text, never as markup, against injection.

const SVG = "http://www.w3.org/2000/svg";
const SHAPES = {
  close: "m6 6 12 12M18 6 6 18",
  like: "M7 11v9H4v-9zm0 0 4-7c1.4 0 2.3 1 2.1 2.4L12.5 10H18a2 2 0 0 1 2 2.3l-1.1 6A2 2 0 0 1 17 20H7",
  similar: "M10.5 4a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13M15.5 15.5 20 20",
  where: "M12 2v5M12 17v5M2 12h5M17 12h5M12 7a5 5 0 1 0 0 10 5 5 0 1 0 0-10",
  dislike: "M17 13V4h3v9zm0 0-4 7c-1.4 0-2.3-1-2.1-2.4l.6-3.6H6a2 2 0 0 1-2-2.3l1.1-6A2 2 0 0 1 7 4h10",
};

// Elements of the page by their id.
export const ui = Object.fromEntries(
  [...document.querySelectorAll("[id]")].map((node) => [node.id, node]),
);

export function element(tag, { testid, ...properties } = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  if (testid) made.dataset.testid = testid;
  made.append(...children);
  return made;
}

// A small button that calls work(button). Screen readers read `about` after its text.
export function smallButton(text, { about = "", className = "", ...properties }, work) {
  const made = element("button", { type: "button", className: `small ${className}`, textContent: text, ...properties });
  if (about) made.append(element("span", { className: "sr-only", textContent: ` ${about}` }));
  made.addEventListener("click", () => work(made));
  return made;
}

// options: [[value, text]].
export const optionsOf = (options) => options.map(([value, textContent]) => element("option", { value, textContent }));

export function icon(name) {
  const drawing = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  drawing.setAttribute("viewBox", "0 0 24 24");
  drawing.setAttribute("class", "icon");
  drawing.setAttribute("aria-hidden", "true");
  path.setAttribute("d", SHAPES[name]);
  drawing.append(path);
  return drawing;
}

export function definitions(pairs) {
  return pairs.flatMap(([term, text]) => [
    element("dt", { textContent: term }),
    element("dd", { textContent: text }),
  ]);
}

// Calls work(event) in place of sending a form.
export function onSubmit(form, work) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    work(event);
  });
}

// Takes files that are dropped anywhere on the page. mark(isOver) shows that it would.
export function acceptDrops(mark, take) {
  addEventListener("dragover", (event) => {
    event.preventDefault();
    mark(true);
  });
  addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) mark(false);
  });
  addEventListener("dragend", () => mark(false));
  addEventListener("drop", (event) => {
    event.preventDefault();
    mark(false);
    take(event.dataTransfer?.files ?? []);
  });
}

// The skip link only moves the focus: the fragment of the URL holds the view and must not change.
export function startSkip(target) {
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    target.focus();
  });
}

// Moves the focus to `home` if the focused control was hidden or removed.
export function keepFocus(home) {
  const { activeElement: focused, body } = document;
  const isLost = focused === null || focused === body || !focused.checkVisibility();
  if (isLost) home.focus({ preventScroll: true });
}

const ANNOUNCE_AFTER_MS = 250;
let announcing = 0;

// Text for screen readers. Of several in quick succession only the last is read.
export function announce(text) {
  clearTimeout(announcing);
  announcing = setTimeout(() => (ui.live.textContent = text), ANNOUNCE_AFTER_MS);
}

export function debounced(work, wait_ms) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...given), wait_ms);
  };
}

// Result cards. Everything that comes from the service enters the page as text, never as markup.

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function splitKey(key) {
  const cut = key.lastIndexOf("/") + 1;
  return { folder: key.slice(0, cut).replaceAll("/", " / ").replace(/ \/ $/, ""), name: key.slice(cut) };
}

function picture(hit) {
  const image = element("img", { loading: "lazy", decoding: "async", alt: hit.key, src: hit.image });
  image.addEventListener("error", () => image.classList.add("broken"));
  return element("span", { className: "picture" }, image);
}

function score(value) {
  const fill = element("span", { className: "score-fill" });
  fill.style.setProperty("--score-part", Math.min(Math.max(value, 0), 1).toFixed(3));
  const bar = element("span", { className: "score-bar", ariaHidden: "true" }, fill);
  const number = element("span", { className: "score-value", textContent: value.toFixed(3) });
  number.dataset.testid = "score";
  return element("span", { className: "score" }, bar, number);
}

function label(key) {
  const { folder, name } = splitKey(key);
  const parts = element("span", { className: "key", title: key });
  parts.append(element("span", { className: "key-name", textContent: name }));
  if (folder) parts.append(element("span", { className: "key-folder", textContent: folder }));
  return parts;
}

export function definitions(pairs) {
  return pairs.flatMap(([term, text]) => [
    element("dt", { textContent: term }),
    element("dd", { textContent: text }),
  ]);
}

function attributes(hit) {
  const pairs = Object.entries(hit.attributes ?? {});
  if (pairs.length === 0) return [];
  const summary = element("summary", { textContent: "Details" });
  summary.append(element("span", { className: "sr-only", textContent: ` of ${hit.key}` }));
  return [element("details", {}, summary, element("dl", {}, ...definitions(pairs)))];
}

export function card(hit, onSelect) {
  const button = element(
    "button",
    { type: "button", className: "card-search" },
    picture(hit),
    label(hit.key),
    score(hit.score),
  );
  button.ariaLabel = `Search with ${hit.key}, score ${hit.score.toFixed(3)}`;
  button.dataset.testid = "card-search";
  button.addEventListener("click", () => onSelect(hit));
  const item = element("li", { className: "card" }, button, ...attributes(hit));
  Object.assign(item.dataset, { testid: "card", id: String(hit.id), key: hit.key });
  return item;
}

export function placeholders(count) {
  return Array.from({ length: count }, () =>
    element("li", { className: "card placeholder", ariaHidden: "true" },
      element("span", { className: "picture" }), element("span", { className: "line" })));
}

// Boxes over the query image, each [left, top, width, height] in fractions of it. They are drawn, moved
// and resized with mouse, pen, touch or the keyboard.

import { element } from "../shared/dom.js";

const SMALLEST = 0.04;
const STEP = 0.02;
const LIMIT = 8;
const KEY_PAUSE_MS = 500;
const NEW_BOX = [0.2, 0.2, 0.6, 0.6];
const CORNERS = { nw: "top left", ne: "top right", sw: "bottom left", se: "bottom right" };
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const whole = (part) => Math.round(part * 100);

function moved([left, top, width, height], dx, dy) {
  return [clamp(left + dx, 0, 1 - width), clamp(top + dy, 0, 1 - height), width, height];
}

function pulled([left, top, width, height], corner, dx, dy) {
  let [right, bottom] = [left + width, top + height];
  if (corner.includes("w")) left = clamp(left + dx, 0, right - SMALLEST);
  else right = clamp(right + dx, left + SMALLEST, 1);
  if (corner.includes("n")) top = clamp(top + dy, 0, bottom - SMALLEST);
  else bottom = clamp(bottom + dy, top + SMALLEST, 1);
  return [left, top, right - left, bottom - top];
}

function between([x0, y0], [x1, y1]) {
  return [Math.min(x0, x1), Math.min(y0, y1), Math.abs(x1 - x0), Math.abs(y1 - y0)];
}

// onChange(boxes) is called after each gesture, announce(text) with sizes for screen readers.
export class Cropper {
  constructor(stage, layer, { onChange, announce }) {
    Object.assign(this, { stage, layer, onChange, announce, shown: [], timer: 0, following: 0 });
    layer.addEventListener("pointerdown", (event) => this.#draw(event));
  }

  get boxes() {
    return this.shown.map(({ box }) => box);
  }

  // Replaces all boxes without a call of onChange. Ignored during a gesture of the user.
  set(boxes) {
    const isSame = JSON.stringify(boxes) === JSON.stringify(this.boxes);
    if (isSame || this.following > 0 || this.timer !== 0) return;
    this.shown = [];
    this.layer.replaceChildren();
    boxes.slice(0, LIMIT).forEach((box) => this.#make(box));
    this.#paint();
  }

  // Adds a box in the middle and focuses it.
  add() {
    if (this.shown.length >= LIMIT) return this.announce(`The limit of ${LIMIT} boxes is reached.`);
    const made = this.#make(NEW_BOX);
    this.#paint();
    made.frame.focus();
    this.#changed();
  }

  clear() {
    this.#changed([]);
    this.set([]);
  }

  #make(box) {
    const node = element("div", { className: "crop-box" });
    const frame = element("button", { type: "button", className: "crop-frame", testid: "crop-frame" });
    const made = { box, node, frame, handles: {} };
    frame.addEventListener("pointerdown", (event) => this.#drag(event, made, null));
    frame.addEventListener("keydown", (event) => this.#press(event, made, null));
    node.append(frame);
    for (const corner of Object.keys(CORNERS)) {
      const handle = element("button", { type: "button", className: `crop-handle crop-${corner}`, testid: `crop-${corner}` });
      handle.addEventListener("pointerdown", (event) => this.#drag(event, made, corner));
      handle.addEventListener("keydown", (event) => this.#press(event, made, corner));
      made.handles[corner] = handle;
      node.append(handle);
    }
    this.layer.append(node);
    this.shown.push(made);
    return made;
  }

  #paint() {
    this.layer.classList.toggle("cropping", this.shown.length > 0);
    this.shown.forEach((made, index) => {
      const [left, top, width, height] = made.box;
      const size = `${whole(width)}% wide and ${whole(height)}% high`;
      const position = `${whole(left)}% from the left, ${whole(top)}% from the top`;
      const values = { left, top, width, height };
      for (const [name, part] of Object.entries(values)) made.node.style[name] = `${part * 100}%`;
      made.frame.setAttribute("aria-label", `Part ${index + 1}: ${size}, ${position}`);
      for (const [corner, handle] of Object.entries(made.handles)) {
        handle.setAttribute("aria-label", `Part ${index + 1}, ${CORNERS[corner]} corner: ${size}`);
      }
    });
  }

  #remove(made) {
    const index = this.shown.indexOf(made);
    if (index < 0) return;
    this.shown.splice(index, 1);
    made.node.remove();
    this.#paint();
  }

  #changed(boxes = this.boxes) {
    clearTimeout(this.timer);
    this.timer = 0;
    this.onChange(boxes);
  }

  #point(event) {
    const area = this.stage.getBoundingClientRect();
    const x = (event.clientX - area.left) / area.width;
    const y = (event.clientY - area.top) / area.height;
    return [clamp(x, 0, 1), clamp(y, 0, 1)];
  }

  // Follows the pointer until it is lifted. `cancelled` is true if the browser took over the gesture.
  #follow(event, target, onMove, onEnd) {
    const mine = ({ pointerId }) => pointerId === event.pointerId;
    const stop = new AbortController();
    const listen = (name, work) =>
      target.addEventListener(name, (next) => mine(next) && work(next), { signal: stop.signal });
    const end = (cancelled) => {
      stop.abort();
      this.following -= 1;
      onEnd(cancelled);
    };
    this.following += 1;
    target.setPointerCapture(event.pointerId);
    listen("pointermove", (next) => onMove(this.#point(next)));
    listen("pointerup", () => end(false));
    listen("pointercancel", () => end(true));
  }

  #draw(event) {
    if (event.button !== 0 || event.target !== this.layer || this.shown.length >= LIMIT) return;
    event.preventDefault();
    const start = this.#point(event);
    let made = null;
    const grow = (point) => {
      const box = between(start, point);
      if (made === null && Math.max(box[2], box[3]) < SMALLEST) return; // still a click
      made ??= this.#make(box);
      made.box = box;
      this.#paint();
    };
    this.#follow(event, this.layer, grow, (cancelled) => {
      if (made === null) return;
      if (cancelled || Math.min(made.box[2], made.box[3]) < SMALLEST) return this.#remove(made);
      made.frame.focus({ focusVisible: false });
      this.#changed();
    });
  }

  #drag(event, made, corner) {
    if (event.button !== 0) return;
    event.stopPropagation();
    const [before, start] = [made.box, this.#point(event)];
    const shift = ([x, y]) => {
      const [dx, dy] = [x - start[0], y - start[1]];
      made.box = corner === null ? moved(before, dx, dy) : pulled(before, corner, dx, dy);
      this.#paint();
    };
    this.#follow(event, event.currentTarget, shift, (cancelled) => {
      if (cancelled) made.box = before;
      this.#paint();
      if (String(made.box) !== String(before)) this.#changed();
    });
  }

  #press(event, made, corner) {
    if (event.key === "Escape" || event.key === "Delete" || event.key === "Backspace") {
      event.preventDefault();
      event.stopPropagation();
      this.#remove(made);
      this.announce(this.shown.length > 0 ? "Part removed" : "Searching with the whole photo");
      (this.shown.at(-1)?.frame ?? this.stage.parentElement.querySelector("button"))?.focus();
      return this.#changed();
    }
    const arrow = ARROWS[event.key];
    if (!arrow || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const [dx, dy] = arrow.map((direction) => direction * STEP);
    const resizes = event.shiftKey || corner !== null;
    made.box = resizes ? pulled(made.box, corner ?? "se", dx, dy) : moved(made.box, dx, dy);
    this.#paint();
    this.announce(event.currentTarget.getAttribute("aria-label"));
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#changed(), KEY_PAUSE_MS);
  }
}

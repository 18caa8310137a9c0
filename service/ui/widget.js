// <kinlens-search>: search by photo on the page of a shop. One file, without a framework or a build.
//
//   <script src="https://search.example/ui/widget.js"></script>
//   <kinlens-search key="kl_..." gallery="shop"></kinlens-search>
//
// Attributes: key (an API key with the scope search; it is public), gallery, k (number of results), filter, group-by
// (one result for each value of an attribute of the items, by default of product; empty: each photo is a result),
// service (the address of the service, by default that of this script; needed if a tag manager or type="module" loads
// it), and the texts label, busy, empty, unreadable, refused and failed. Events: kinlens-results and kinlens-error,
// with the answer or the problem as detail.
(() => {
  const SCRIPT = document.currentScript?.src; // not known in a module or with a tag manager
  const HOME = SCRIPT ? new URL("..", SCRIPT).href : null;
  const MAX_SIDE_PX = 1280; // more than any model sees, a tenth of a phone photo
  const PRODUCT = "product"; // the attribute that photos of one product share
  const OF_THE_PHOTO = [413, 415, 422]; // statuses
  const OF_THE_ELEMENT = [400, 401, 403, 404, 422]; // its attributes are wrong, if the photo is not
  const TITLES = ["title", "name", "product", "product_name"];
  const TEXTS = {
    label: "Search by photo",
    busy: "Searching …",
    empty: "Nothing similar was found. Try another photo.",
    unreadable: "This file cannot be read as a photo. Please try another one.",
    refused: "The search on this page does not work. Please tell the shop.",
    failed: "The search does not work right now. Please try again in a moment.",
  };
  const STYLE = `
    :host { display: block; font: inherit; }
    label { display: inline-block; padding: .75em 1.25em; border: 1px solid currentColor; border-radius: .5em; cursor: pointer; }
    label:focus-within { outline: 2px solid; outline-offset: 2px; }
    input { position: absolute; opacity: 0; width: 1px; height: 1px; }
    ol { display: grid; grid-template-columns: repeat(auto-fill, minmax(9em, 1fr)); gap: 1em; padding: 0; list-style: none; }
    a { color: inherit; text-decoration: none; }
    a:hover span, a:focus span { text-decoration: underline; }
    img { width: 100%; height: auto; aspect-ratio: 1; object-fit: cover; border-radius: .5em; background: #8882; }
    img.missing { visibility: hidden; }
    span { display: block; overflow-wrap: anywhere; }
    p:empty { display: none; }`;

  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };

  // The photo as a small JPEG, upright; one that this browser cannot decode, such as HEIC, is sent as it is.
  async function shrunk(file) {
    try {
      const image = await createImageBitmap(file);
      const scale = Math.min(1, MAX_SIDE_PX / Math.max(image.width, image.height));
      const canvas = element("canvas", { width: Math.round(image.width * scale), height: Math.round(image.height * scale) });
      const context = canvas.getContext("2d");
      context.fillStyle = "white"; // as the service shows what is transparent
      context.fillRect(0, 0, canvas.width, canvas.height);
      context.drawImage(image, 0, 0, canvas.width, canvas.height);
      return await new Promise((resolve) => canvas.toBlob((blob) => resolve(blob ?? file), "image/jpeg", 0.9));
    } catch {
      return file;
    }
  }

  const isText = (value) => typeof value === "string" && value.trim() !== "";

  // The text for a customer. A parameter that the service refuses is one of the element.
  function textFor({ problem }) {
    const isOfElement = /:(invalid-parameter|invalid-filter)$/.test(problem?.type);
    if (/:empty-image$/.test(problem?.type)) return "unreadable";
    if (!isOfElement && OF_THE_PHOTO.includes(problem?.status)) return "unreadable";
    return OF_THE_ELEMENT.includes(problem?.status) ? "refused" : "failed";
  }

  // The address of the product in the shop, or "". Other schemes than http and https could run a script.
  function shopLink(template, attributes) {
    let isComplete = true;
    const fill = (_, name) => {
      isComplete &&= typeof attributes[name] === "number" || isText(attributes[name]);
      return encodeURIComponent(attributes[name]);
    };
    const text = template.includes("{") ? template.replaceAll(/\{([^{}]+)\}/g, fill) : attributes[template];
    if (!isComplete || !isText(text)) return "";
    const url = URL.canParse(text, location.href) ? new URL(text, location.href) : null;
    return url !== null && /^https?:$/.test(url.protocol) ? url.href : "";
  }

  function priceOf(attributes) {
    // Nothing else that ends so: cost_price is not for customers. service/cards.py has the same rule.
    const name = Object.keys(attributes).find((key) => key.toLowerCase() === "price");
    const price = attributes[name];
    const { currency } = attributes;
    if (typeof price !== "number") return price ?? "";
    try {
      return price.toLocaleString(navigator.language, currency ? { style: "currency", currency } : {});
    } catch {
      return `${price} ${currency}`; // not an ISO 4217 code
    }
  }

  class KinlensSearch extends HTMLElement {
    #run = 0;
    #known = { of: null, gallery: null };

    connectedCallback() {
      if (this.shadowRoot) return;
      const style = new CSSStyleSheet(); // a style element would need 'unsafe-inline' in the shop's policy
      style.replaceSync(STYLE);
      const root = this.attachShadow({ mode: "open" });
      root.adoptedStyleSheets = [style];
      const input = element("input", { type: "file", accept: "image/*" });
      input.addEventListener("change", () => {
        if (input.files.length > 0) this.search(input.files[0]);
        input.value = ""; // the same photo again is a change, too
      });
      this.note = element("p", { role: "status" });
      this.results = element("ol");
      root.append(element("label", {}, this.#text("label"), input), this.note, this.results);
      for (const name of ["dragover", "drop"]) this.addEventListener(name, (event) => event.preventDefault());
      this.addEventListener("drop", ({ dataTransfer }) => {
        if (dataTransfer.files.length > 0) this.search(dataTransfer.files[0]);
      });
    }

    // Searches with a File or Blob and shows the results; a later search replaces an earlier one.
    async search(file) {
      const run = ++this.#run;
      this.note.textContent = this.#text("busy");
      this.results.replaceChildren();
      try {
        const gallery = await this.#gallery();
        const hasProducts = gallery.attributes.some(({ name }) => name === PRODUCT);
        const groupBy = this.getAttribute("group-by") ?? (hasProducts ? PRODUCT : "");
        const form = new FormData();
        form.set("image", await shrunk(file), "photo");
        form.set("k", this.getAttribute("k") ?? "12");
        if (this.hasAttribute("gallery")) form.set("gallery", gallery.name); // else the service chooses
        if (groupBy !== "") form.set("group_by", groupBy);
        if (this.hasAttribute("filter")) form.set("filter", this.getAttribute("filter"));
        const answer = await this.#fetch("search", { method: "POST", body: form });
        if (run !== this.#run) return;
        const hits = answer.groups?.map(({ hits: [best] }) => best) ?? answer.hits;
        this.note.textContent = hits.length > 0 ? "" : this.#text("empty");
        this.results.replaceChildren(...hits.map((hit) => this.#card(hit, gallery.product_url ?? "")));
        this.dispatchEvent(new CustomEvent("kinlens-results", { detail: answer, bubbles: true }));
      } catch (error) {
        this.#known = { of: null, gallery: null }; // it may have changed
        if (run !== this.#run) return;
        console.error(`kinlens-search: ${error.message}`); // for the shop
        this.note.textContent = this.#text(textFor(error));
        this.dispatchEvent(new CustomEvent("kinlens-error", { detail: error.problem ?? error, bubbles: true }));
      }
    }

    #text(name) {
      return this.getAttribute(name) ?? TEXTS[name];
    }

    // The gallery with its attributes. Asked for once, and again after a failure or a change of the element.
    async #gallery() {
      const of = ["gallery", "key", "service"].map((name) => this.getAttribute(name)).join(" ");
      if (this.#known.of !== of) {
        const name = this.getAttribute("gallery") ?? (await this.#fetch("galleries")).galleries[0]?.name;
        if (name === undefined) throw new Error("The service has no gallery for this key.");
        this.#known = { of, gallery: await this.#fetch(`galleries/${encodeURIComponent(name)}`) };
      }
      return this.#known.gallery;
    }

    get #service() {
      const service = this.getAttribute("service")?.replace(/\/*$/, "/") ?? HOME;
      if (service === null) throw new Error('The address of the service is unknown; add the attribute service to kinlens-search.');
      return service;
    }

    async #fetch(path, options = {}) {
      const key = this.getAttribute("key");
      const headers = key === null ? {} : { "X-API-Key": key };
      const response = await fetch(new URL(path, this.#service), { ...options, headers });
      const unreadable = { title: response.statusText, status: response.status, detail: `The answer ${response.status} of ${response.url} is not JSON.` };
      const body = await response.json().catch(() => unreadable); // the error page of a proxy
      if (!response.ok || body === unreadable) throw Object.assign(new Error(body.detail), { problem: body });
      return body;
    }

    #card({ key, image, image_url: elsewhere, attributes }, template) {
      const title = TITLES.map((name) => attributes[name]).find(isText) ?? key;
      const source = (size) => {
        if (elsewhere) return elsewhere;
        const url = new URL(image, this.#service);
        url.searchParams.set("size", size);
        return url.href;
      };
      const thumbnail = element("img", { loading: "lazy", width: 320, height: 320, alt: "" });
      thumbnail.addEventListener("error", () => thumbnail.classList.add("missing"));
      Object.assign(thumbnail, { srcset: `${source(320)} 1x, ${source(640)} 2x`, src: source(320) });
      const parts = [thumbnail, element("span", { textContent: title }), element("span", { textContent: priceOf(attributes) })];
      const href = shopLink(template, attributes);
      return element("li", {}, href === "" ? element("div", {}, ...parts) : element("a", { href }, ...parts));
    }
  }

  if (!customElements.get("kinlens-search")) customElements.define("kinlens-search", KinlensSearch);
})();

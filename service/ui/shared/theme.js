// Sets light or dark before the first paint: the stored choice, or the system's.
// A classic script on purpose: a module would run after the first paint, and the page would flash.

(() => {
  const CHOICES = ["system", "light", "dark"];
  const NAMES = { system: "same as system", light: "light", dark: "dark" };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let choice = stored();

  function stored() {
    try {
      const found = localStorage.getItem("kinlens.theme");
      return CHOICES.includes(found) ? found : "system";
    } catch {
      return "system";
    }
  }

  function apply() {
    const shown = choice === "system" ? (dark.matches ? "dark" : "light") : choice;
    document.documentElement.dataset.theme = shown;
    const button = document.getElementById("theme");
    button?.setAttribute("aria-label", `Colours: ${NAMES[choice]}`);
    button?.setAttribute("title", `Colours: ${NAMES[choice]}`);
  }

  function next() {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    try {
      localStorage.setItem("kinlens.theme", choice);
    } catch {
      // Blocked storage: the choice lasts as long as the page.
    }
    apply();
  }

  apply();
  dark.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme")?.addEventListener("click", next);
    apply();
  });
})();

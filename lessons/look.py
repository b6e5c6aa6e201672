"""How the course's pages look: colours for light and dark, one style sheet, one short script."""

COLORS = {                   # name: (light, dark)
    "paper": ("#ffffff", "#16181c"), "ink": ("#1d1f23", "#e4e6ea"),
    "soft": ("#f4f5f7", "#212429"), "line": ("#c4c8ce", "#454a52"),
    "faint": ("#565b63", "#a8adb6"), "link": ("#0b57a4", "#8ab8f0"),
    "keyword": ("#8a2090", "#d79be0"), "string": ("#2a6410", "#a3cf83"),
    "comment": ("#5a6068", "#a2a8b0"), "defined": ("#0b57a4", "#8ab8f0"),
    "good": ("#1b6426", "#8fd29a"), "bad": ("#a51d1d", "#f2a0a0"),
    "forward": ("#bcd6f2", "#28527e"), "backward": ("#f5cfa0", "#7a4a12"),
    "weights": ("#e6dc98", "#5f5514"), "other": ("#cfe3c8", "#335c2c"),
    "idle": ("#eceef0", "#2a2e34")}

# Which colour of text stands on which background; a test computes their contrast.
READ_ON = {"ink": "paper soft forward backward weights other idle", "faint": "paper soft",
           "link": "paper soft", "keyword": "soft", "string": "soft", "comment": "soft",
           "defined": "soft", "good": "paper soft", "bad": "paper soft"}


def variables(theme):
    return " ".join(f"--{name}: {both[theme]};" for name, both in COLORS.items())


def style():
    """The text of style.css."""
    return (f":root {{ color-scheme: light dark; {variables(0)} }}\n"
            f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(1)} }} }}\n" + RULES
            + f"@media print {{\n  :root {{ {variables(0)} }}\n{PRINT}}}\n")


RULES = """\
* { box-sizing: border-box; }
html { font: 100%/1.5 system-ui, sans-serif; background: var(--paper); color: var(--ink);
  -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 0 1rem 3rem; max-width: 60rem; overflow-wrap: break-word; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -999rem; background: var(--paper); padding: .5rem; }
.skip:focus { left: 1rem; top: .5rem; z-index: 1; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; padding: .75rem 0;
  border-bottom: 1px solid var(--line); }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 1.5rem 0 .25rem; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 2.25rem 0 .5rem; }
.question { font-size: 1.15rem; margin: 0 0 1rem; }
p { max-width: 48rem; margin: .6rem 0; }
pre, code { font: .84rem/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
pre { margin: 0; }
.wide { overflow-x: auto; margin: .75rem 0; padding: .5rem .75rem; background: var(--soft);
  border: 1px solid var(--line); border-radius: 4px; }
table { border-collapse: collapse; font-size: .92rem; }
th, td { text-align: left; padding: .15rem 1.2rem .15rem 0; vertical-align: top;
  white-space: nowrap; }
th { border-bottom: 1px solid var(--line); }
.n { text-align: right; font-variant-numeric: tabular-nums; }
.toc td:first-child, .toc td:nth-child(2) { white-space: normal; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .75rem 0; }
dt { color: var(--faint); }
dd { margin: 0; }
.check { display: flex; flex-wrap: wrap; gap: 0 1rem; justify-content: space-between;
  max-width: 48rem; margin: .4rem 0; }
.check span { color: var(--faint); }
.ok, .EQUIVALENT, .CAUGHT { color: var(--good); font-weight: 600; }
.WRONG { color: var(--bad); font-weight: 600; }
details { margin: .75rem 0; max-width: 100%; }
summary { cursor: pointer; max-width: 48rem; }
.guess { border-left: 4px solid var(--link); padding: .25rem .75rem; background: var(--soft); }
.bug { border-left: 4px solid var(--bad); padding-left: .75rem; }
p.own, summary.own { color: var(--faint); }
figure { margin: 1rem 0; }
figcaption { color: var(--faint); font-size: .92rem; }
img { max-width: 100%; height: auto; background: #fff; }
svg { display: block; font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
svg text { fill: var(--ink); }
button { font: inherit; padding: .2rem .8rem; margin-right: .5rem; color: var(--ink);
  background: var(--soft); border: 1px solid var(--line); border-radius: 4px; cursor: pointer; }
.F { fill: var(--forward); } .B, .I { fill: var(--backward); } .W { fill: var(--weights); }
.idle, .even { fill: var(--idle); } .odd { fill: var(--other); }
.later { opacity: .12; }
.now > rect { stroke: var(--ink); stroke-width: 2.5; }
.now > text { font-weight: 700; }
.k { color: var(--keyword); } .s { color: var(--string); } .d { color: var(--defined); }
.c { color: var(--comment); font-style: italic; }
"""

PRINT = """\
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav, .skip, button, output { display: none; }
  .wide { overflow: visible; border: 0; padding: 0; }
  pre { white-space: pre-wrap; font-size: 8pt; }
  section { break-inside: auto; }
  h2 { break-after: avoid; }
  figure, table { break-inside: avoid; }
  .guess::details-content { content-visibility: visible; }
  svg { max-width: 100%; height: auto; }
"""

# A figure is drawn whole. This steps through it: a part has data-from, the step at which it begins,
# and data-to, that at which it has ended; the figure's data-steps says what happens at each step.
SCRIPT = """\
"use strict";
for (const figure of document.querySelectorAll("figure[data-steps]")) {
  const steps = JSON.parse(figure.dataset.steps), said = document.createElement("output");
  const parts = figure.querySelectorAll("[data-from]"), bar = document.createElement("div");
  let at = -1;
  const show = (step) => {
    at = Math.max(-1, Math.min(steps.length - 1, step));
    for (const part of parts) {
      const from = Number(part.dataset.from), to = Number(part.dataset.to);
      part.classList.toggle("later", at >= 0 && from > at);
      part.classList.toggle("now", at >= 0 && from <= at && at < to);
    }
    const now = figure.querySelector(".now"), box = figure.querySelector(".wide");
    if (now) box.scrollLeft = now.getBBox().x - box.clientWidth / 2;
    said.textContent = at < 0 ? "" : (at + 1) + "/" + steps.length + "  " + steps[at];
  };
  const keys = { ArrowRight: () => at + 1, ArrowLeft: () => at - 1,
                 Home: () => 0, End: () => steps.length - 1, Escape: () => -1 };
  for (const [text, key] of [["back", "ArrowLeft"], ["step", "ArrowRight"], ["whole", "Escape"]]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", () => show(keys[key]()));
    bar.append(button);
  }
  said.setAttribute("aria-live", "polite");
  figure.addEventListener("keydown", (event) => {
    const scrolls = event.target.closest(".wide");          // its arrow keys are the browser's
    if (keys[event.key] && !scrolls && !event.ctrlKey && !event.altKey && !event.metaKey) {
      show(keys[event.key]());
      event.preventDefault();
    }
  });
  bar.append(said);
  figure.append(bar);
}
"""

const { charts, matrices } = JSON.parse(document.getElementById("data").textContent);
const drawn = new Set();

async function draw() {
  for (const place of document.querySelectorAll("[data-chart]")) {
    if (drawn.has(place) || place.closest("[hidden]")) continue;
    drawn.add(place);
    const chart = charts[place.dataset.chart];
    await window.vegaEmbed(place, chart, { renderer: "svg", actions: false });
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", chart.description);
    place.removeAttribute("aria-roledescription");
  }
  document.body.dataset.charts = drawn.size;
}

function choose(select) {
  for (const part of document.querySelectorAll(`[data-of="${select.id}"]`)) part.hidden = part.dataset.is !== select.value;
  return draw();
}

function slide(range) {
  const stop = matrices[range.dataset.matrix][range.value];
  range.nextElementSibling.value = stop.title;
  range.setAttribute("aria-valuetext", stop.title);
  const cells = document.getElementById(range.dataset.matrix).querySelectorAll("td");
  stop.shares.flat().forEach((share, i) => {
    cells[i].textContent = Math.round(100 * share);
    cells[i].style.backgroundColor = `rgba(76, 120, 168, ${(0.75 * share).toFixed(3)})`;
  });
}

for (const select of document.querySelectorAll("select")) select.addEventListener("change", () => choose(select));
for (const range of document.querySelectorAll("input[type=range]")) range.addEventListener("input", () => slide(range));
document.getElementById("print").addEventListener("click", () => window.print());
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => (part.open = true)));
for (const select of document.querySelectorAll("select")) await choose(select);
for (const range of document.querySelectorAll("input[type=range]")) slide(range);
await draw();
document.body.dataset.ready = "yes";

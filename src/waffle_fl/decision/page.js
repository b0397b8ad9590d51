const { matrices } = JSON.parse(document.getElementById("data").textContent);

function choose(select) {
  for (const part of document.querySelectorAll(`[data-of="${select.id}"]`)) part.hidden = part.dataset.is !== select.value;
}

function slide(range) {
  const stop = matrices[range.dataset.matrix][range.value];
  range.nextElementSibling.value = stop.title;
  range.setAttribute("aria-valuetext", stop.title);
  const cells = document.getElementById(range.dataset.matrix).querySelectorAll("td");
  stop.shares.flat().forEach((share, i) => {
    cells[i].textContent = Math.round(100 * share);
    cells[i].style.setProperty("--shade", (0.75 * share).toFixed(3));
  });
}

for (const select of document.querySelectorAll("select")) select.addEventListener("change", () => choose(select));
for (const range of document.querySelectorAll("input[type=range]")) range.addEventListener("input", () => slide(range));
document.getElementById("print").addEventListener("click", () => window.print());
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => (part.open = true)));
document.querySelectorAll("select").forEach(choose);
document.querySelectorAll("input[type=range]").forEach(slide);
document.body.dataset.charts = document.querySelectorAll(".chart").length;
document.body.dataset.ready = "yes";

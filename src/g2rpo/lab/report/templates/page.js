"use strict";
// Pictures: controls that need this script; a slider chooses which iteration stands beside the base.
for (const tools of document.querySelectorAll(".tools")) tools.hidden = false;
for (const slider of document.querySelectorAll(".scrub input")) {
  const frames = slider.closest(".frames"), iterations = slider.dataset.iterations.split(",");
  const show = () => {
    frames.querySelector("output").value = iterations[slider.value];
    slider.setAttribute("aria-valuetext", "iteration " + iterations[slider.value]);
    for (const frame of frames.querySelectorAll("[data-frame]")) frame.hidden = frame.dataset.frame !== slider.value;
  };
  slider.addEventListener("input", show);
  show();
}
// Charts: a cursor at the nearest x, and what every line says there.
for (const svg of document.querySelectorAll("svg.chart")) {
  const data = JSON.parse(svg.dataset.chart), cursor = svg.querySelector(".cursor"), card = svg.parentElement;
  const xs = [...new Set(data.lines.flatMap(line => line.x))];
  let tip = null;
  const leave = () => { if (tip) tip.remove(); tip = null; cursor.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const [left, right] = data.box, [low, high] = data.x;
    const x = low + ((event.clientX - box.left) * scale - left) / (right - left) * (high - low);
    const at = xs.reduce((a, b) => Math.abs(b - x) < Math.abs(a - x) ? b : a);
    const across = left + (at - low) / (high - low) * (right - left);
    cursor.setAttribute("transform", `translate(${across} 0)`);
    cursor.setAttribute("visibility", "visible");
    if (!tip) { tip = document.createElement("div"); tip.className = "tip"; card.append(tip); }
    tip.replaceChildren(document.createTextNode(`${data.label} ${Math.round(at * 10) / 10}`));
    for (const line of data.lines) {
      const i = line.x.findLastIndex(each => each <= at);
      if (i < 0) continue;
      const row = document.createElement("div"), value = document.createElement("b");
      value.textContent = line.y[i];
      row.append(line.name ? line.name + " " : "", value, line.x[i] === at ? "" : ` (at ${Math.round(line.x[i] * 10) / 10})`);
      tip.append(row);
    }
    const wide = tip.offsetWidth, px = across / scale;
    tip.style.left = Math.max(0, px + 12 + wide > box.width ? px - 12 - wide : px + 12) + "px";
  });
}

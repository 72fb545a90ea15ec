"use strict";
// Of each picture with points: the values under the pointer, and a switch between its axes, linear and logarithmic.
const number = value => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(value);
for (const figure of document.querySelectorAll("figure[data-points]")) {
  const plot = figure.querySelector(".plot"), line = plot.querySelector("i"), says = plot.querySelector("output");
  const images = [...plot.querySelectorAll("img")], button = figure.querySelector("button");
  const points = JSON.parse(figure.dataset.points);
  let shown = 0;
  if (button) {
    button.hidden = false;
    button.onclick = () => {
      shown = 1 - shown;
      images.forEach((image, i) => { image.hidden = i !== shown; });
      button.setAttribute("aria-pressed", shown === 1);
    };
  }
  plot.onpointerleave = () => { says.hidden = line.hidden = true; };
  plot.onpointermove = event => {
    const whole = plot.getBoundingClientRect();
    const left = (event.clientX - whole.left) / whole.width, top = (event.clientY - whole.top) / whole.height;
    const axes = points[shown].find(({box}) => left >= box[0] && left <= box[2] && top >= box[1] && top <= box[3]);
    says.hidden = line.hidden = !axes;
    if (!axes) return;
    const [low, high] = axes.x, part = (left - axes.box[0]) / (axes.box[2] - axes.box[0]);
    const at = axes.log ? low * (high / low) ** part : low + (high - low) * part;
    const away = x => Math.abs(x - at);
    const nearest = axes.xs.map(xs => xs.reduce((best, x, i) => away(x) < away(xs[best]) ? i : best, 0));
    const x = axes.xs[0][nearest[0]];
    const texts = axes.lines.map(([name, which, ys]) => {
      if (which < 0) return `${name}: ${number(ys[0])}`;
      const its = axes.xs[which][nearest[which]], y = ys[nearest[which]];
      return `${name}: ${y === null ? "-" : number(y)}${its === x ? "" : ` (at ${number(its)})`}`;
    });
    says.textContent = [`${axes.name}: ${number(x)}`, ...texts].join("\n");
    line.style.left = `${100 * left}%`;
    says.style.left = left < .5 ? `calc(${100 * left}% + 10px)` : "";
    says.style.right = left < .5 ? "" : `calc(${100 - 100 * left}% + 10px)`;
  };
}

const number = y => String(Math.abs(y) >= 1e5 || (y && Math.abs(y) < 1e-3) ? y.toExponential(2) : +y.toPrecision(4));
const between = (value, [a, b], low, high) => low + (value - a) / ((b - a) || 1) * (high - low);
const nearest = (points, step) => points.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a);
const ticks = (low, high) => {  // round values that enclose low..high; noise of a level line does not fill the picture
  const least = 0.02 * Math.max(Math.abs(low), Math.abs(high)) || 1, middle = (low + high) / 2;
  if (high - low < least) [low, high] = [middle - least / 2, middle + least / 2];
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5].map(factor => factor * power).find(size => size >= rough * 0.999) || 10 * power;
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({length: last - first + 1}, (_, i) => (first + i) * step);
};
const smoothed = points => points.map(([x], i) => {  // a centred window, narrower towards the ends: a slope stays
  const half = Math.min(Math.floor(points.length / 24) || 1, i, points.length - 1 - i);
  const near = points.slice(i - half, i + half + 1);
  return [x, near.reduce((sum, [, y]) => sum + y, 0) / near.length];
});
const shapesOf = (series, stacked) => {  // [kind, class, points] of what is drawn
  let floor = series[0].map(([x]) => [x, 0]);
  return series.flatMap((own, i) => {
    const colour = `s${i % 8}`;
    if (stacked && own.length > 1) {
      const below = floor;
      floor = own.map(([x, y], j) => [x, y + below[j][1]]);
      return [['polygon', `band ${colour}`, [...floor, ...below.slice().reverse()]]];
    }
    if (own.length < 3) return own.map(point => ['circle', `dot ${colour}`, [point]]);
    return own.length < 40 ? [['polyline', `line ${colour}`, own]]
      : [['polyline', `line raw ${colour}`, own], ['polyline', `line ${colour}`, smoothed(own)]];
  });
};
let zoomed = 0;
document.querySelectorAll('svg').forEach(svg => {
  const [left, right, top, bottom] = [52, 448, 10, 194], series = JSON.parse(svg.dataset.series);
  const shapes = shapesOf(series, svg.dataset.stacked === '1'), steps = series.flat().map(([step]) => step);
  const whole = [Math.min(...steps), Math.max(...steps)];
  const tip = svg.parentNode.querySelector('.tip'), values = [...svg.parentNode.querySelectorAll('.key b')];
  const latest = values.map(value => value.textContent);
  let x = whole, bar, picked, from = null;
  const add = (kind, attributes, text, parent = svg) => {
    const made = document.createElementNS(svg.namespaceURI, kind);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  };
  const draw = range => {
    zoomed += (range !== whole) - (x !== whole);
    x = range;
    const all = shapes.flatMap(([, , points]) => points), seen = all.filter(([step]) => step >= x[0] && step <= x[1]);
    const heights = (seen.length ? seen : all).map(([, y]) => y);
    const marks = ticks(Math.min(...heights), Math.max(...heights)), y = [marks[0], marks[marks.length - 1]];
    const across = step => between(step, x, left, right), up = value => between(value, y, bottom, top);
    svg.replaceChildren();
    marks.forEach(value => {
      add('line', {class: 'grid', x1: left, x2: right, y1: up(value), y2: up(value)});
      add('text', {class: 'tick', x: left - 6, y: up(value) + 3.5, 'text-anchor': 'end'}, +value.toPrecision(6));
    });
    new Set([x[0], Math.round((x[0] + x[1]) / 2), x[1]]).forEach(step => add('text', {class: 'tick', x: across(step),
      y: bottom + 18, 'text-anchor': step === x[0] ? 'start' : step === x[1] ? 'end' : 'middle'}, step));
    const box = {x: left - 4, y: top - 4, width: right - left + 8, height: bottom - top + 8};
    const area = add('svg', {...box, viewBox: Object.values(box).join(' ')});  // what a zoom leaves out is cut off
    shapes.forEach(([kind, name, points]) => add(kind, {class: name, ...(kind === 'circle'
      ? {cx: across(points[0][0]), cy: up(points[0][1]), r: 3}
      : {points: points.map(([step, value]) => `${across(step).toFixed(2)},${up(value).toFixed(2)}`).join(' ')})},
      undefined, area));
    bar = add('line', {class: 'bar', y1: top, y2: bottom});
    picked = add('rect', {class: 'picked', y: top, height: bottom - top});
    rest();
  };
  const rest = () => {
    bar.style.display = 'none';
    values.forEach((value, i) => { value.textContent = latest[i]; });
    tip.textContent = x === whole ? '' : 'double click: all steps';
  };
  const at = event => { const box = svg.getBoundingClientRect();
    return Math.min(right, Math.max(left, (event.clientX - box.left) / box.width * 460)); };
  const stepAt = px => between(px, [left, right], ...x);
  const drop = () => { from = null; picked.style.display = 'none'; };
  svg.addEventListener('pointermove', event => {
    const px = at(event), near = series.map(own => nearest(own, stepAt(px))), [step] = nearest(near, stepAt(px));
    near.forEach(([own, value], i) => {
      values[i].textContent = number(value) + (own === step ? '' : ' at ' + Math.round(own)); });
    bar.setAttribute('x1', between(step, x, left, right)); bar.setAttribute('x2', between(step, x, left, right));
    bar.style.display = 'block';
    tip.textContent = 'step ' + Math.round(step);
    if (from === null) return;
    const start = between(from, x, left, right);
    picked.setAttribute('x', Math.min(start, px)); picked.setAttribute('width', Math.abs(px - start));
    picked.style.display = 'block';
  });
  svg.addEventListener('pointerleave', () => { drop(); rest(); });
  svg.addEventListener('pointercancel', drop);
  svg.addEventListener('pointerdown', event => { from = stepAt(at(event)); svg.setPointerCapture(event.pointerId);
    event.preventDefault(); });
  svg.addEventListener('pointerup', event => {
    const ends = [from, stepAt(at(event))].sort((a, b) => a - b), wide = x[1] - x[0];
    const range = [Math.floor(ends[0]), Math.ceil(ends[1])];
    if (from !== null && ends[1] - ends[0] > wide / 50 && range[1] - range[0] < wide) draw(range);
    drop();
  });
  svg.addEventListener('dblclick', () => draw(whole));
  draw(whole);
});
document.querySelectorAll('form').forEach(form => {  // which samples are shown
  const rows = [...form.querySelectorAll('tr')].slice(1), data = row => row.dataset;
  const late = rows.slice(-Math.max(8, rows.length / 4)).filter(row => data(row).reward);
  const best = late.sort((a, b) => data(b).reward - data(a).reward);
  const choices = {all: rows, first: rows.slice(0, 8), last: rows.slice(-8), best: best.slice(0, 8),
    worst: best.slice(-8), random: rows.filter(() => Math.random() < 8 / rows.length),
    truncated: rows.filter(row => data(row).end === 'truncated'),
    'not graded': rows.filter(row => data(row).graded === 'no')};
  const show = () => rows.forEach(row => { row.hidden = !choices[form.elements.shown.value].includes(row); });
  form.addEventListener('change', show);
  show();
});
const refresh = Number(document.body.dataset.refresh);
if (refresh) setInterval(() => {  // not under the eyes of somebody who looks at a part of it
  const filtered = [...document.querySelectorAll('form')].some(form => form.elements.shown.value !== 'last');
  if (!zoomed && !filtered && getSelection().isCollapsed) location.reload();
}, refresh * 1000);

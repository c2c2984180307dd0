const make = (kind, parent, attributes, text) => {
  const made = document.createElementNS(parent.namespaceURI, kind);
  Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
};
const pairs = text => text.split(' ').map(pair => pair.split(',').map(Number));
const number = y => String(Math.abs(y) >= 1e5 || (y && Math.abs(y) < 1e-3) ? y.toExponential(2) : +y.toPrecision(4));
const ticks = (low, high, flat) => {  // as nice_range in charts.py
  const size = Math.max(Math.abs(low), Math.abs(high)), least = flat * size || 1, middle = (low + high) / 2;
  if (high - low < least) [low, high] = [middle - least / 2, middle + least / 2];
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(factor => factor * power).find(one => one >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({length: last - first + 1}, (_, i) => (first + i) * step);
};
let zoomed = 0;
document.querySelectorAll('svg[data-x]').forEach(svg => {
  const [left, right, top, bottom] = svg.dataset.frame.split(',').map(Number), flat = Number(svg.dataset.flat);
  const whole = svg.dataset.x.split(',').map(Number), tall = svg.dataset.y.split(',').map(Number);
  const shapes = [...svg.querySelectorAll('polyline, polygon')].map(shape =>
    ({shape, points: pairs(shape.getAttribute('points'))}));
  const dots = [...svg.querySelectorAll('circle')].map(shape =>
    ({shape, px: Number(shape.getAttribute('cx')), py: Number(shape.getAttribute('cy'))}));
  const series = [...svg.querySelectorAll('[data-values]')].map(shape => pairs(shape.dataset.values));
  const drawn = [...svg.querySelectorAll('.grid, .tick')], own = drawn[0].parentNode.insertBefore(
    document.createElementNS(svg.namespaceURI, 'g'), drawn[0]);
  const bar = svg.querySelector('.bar'), picked = svg.querySelector('.picked');
  const tip = svg.parentNode.querySelector('.tip'), told = [...svg.parentNode.querySelectorAll('.key b')];
  const latest = told.map(one => one.textContent);
  let x = whole, y = tall, from = null;
  const between = (value, [a, b], low, high) => low + (value - a) / ((b - a) || 1) * (high - low);
  const stepAt = px => between(px, [left, right], ...x), valueAt = py => between(py, [bottom, top], ...tall);
  const across = px => between(between(px, [left, right], ...whole), x, left, right);
  const up = py => between(valueAt(py), y, bottom, top);
  const at = event => { const box = svg.getBoundingClientRect();
    return Math.min(right, Math.max(left, (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width)); };
  const nearest = (values, step) => values.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a);
  const rest = () => { bar.style.display = 'none'; told.forEach((one, i) => { one.textContent = latest[i]; });
    tip.textContent = x === whole ? '' : 'double click: all steps'; };
  const draw = range => {
    zoomed += (range !== whole) - (x !== whole);
    x = range;
    const seen = shapes.flatMap(({points}) => points.filter(([px]) => { const on = across(px);
      return on >= left - 1 && on <= right + 1; }).map(([, py]) => valueAt(py)));
    const shown = seen.length ? [Math.min(...seen), Math.max(...seen)] : tall;
    const places = x === whole ? null : ticks(...shown, flat);
    y = places ? [places[0], places[places.length - 1]] : tall;
    shapes.forEach(({shape, points}) => shape.setAttribute('points',
      points.map(([px, py]) => across(px).toFixed(2) + ',' + up(py).toFixed(2)).join(' ')));
    dots.forEach(({shape, px, py}) => { shape.setAttribute('cx', across(px)); shape.setAttribute('cy', up(py)); });
    drawn.forEach(one => { one.style.display = places ? 'none' : ''; });
    own.replaceChildren();
    if (places) {
      places.forEach(value => { const py = between(value, y, bottom, top);
        make('line', own, {class: 'grid', x1: left, x2: right, y1: py, y2: py});
        make('text', own, {class: 'tick', x: left - 6, y: py + 3.5, 'text-anchor': 'end'}, +value.toPrecision(6)); });
      new Set([x[0], Math.round((x[0] + x[1]) / 2), x[1]]).forEach(step => make('text', own, {class: 'tick',
        x: between(step, x, left, right), y: bottom + 18,
        'text-anchor': step === x[0] ? 'start' : step === x[1] ? 'end' : 'middle'}, step));
    }
    rest();
  };
  svg.addEventListener('pointermove', event => {
    const px = at(event), near = series.map(values => nearest(values, stepAt(px)));
    const step = nearest(near, stepAt(px))[0], on = between(step, x, left, right);
    told.forEach((one, i) => { const [own, value] = near[i];
      one.textContent = number(value) + (own === step ? '' : ' at ' + Math.round(own)); });
    bar.setAttribute('x1', on); bar.setAttribute('x2', on); bar.style.display = 'block';
    tip.textContent = 'step ' + Math.round(step);
    if (from !== null) { const start = between(from, x, left, right);
      picked.setAttribute('x', Math.min(start, px)); picked.setAttribute('width', Math.abs(px - start));
      picked.style.display = 'block'; }
  });
  const drop = () => { from = null; picked.style.display = 'none'; };
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
});
const refresh = Number(document.body.dataset.refresh);
if (refresh) setInterval(() => {  // not under the eyes of somebody who looks at a part of it
  const filtered = [...document.querySelectorAll('.filter input:checked')].some(one => one.dataset.all === undefined);
  if (!zoomed && !filtered && getSelection().isCollapsed) location.reload();
}, refresh * 1000);

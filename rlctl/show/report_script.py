"""The one script of a report: values under the pointer, and zoom. The page's policy names its hash, so that no other
script runs there."""

from __future__ import annotations

import base64
import hashlib

SCRIPT = """
document.querySelectorAll('svg[data-x]').forEach(svg => {
  const [left, right, top, bottom] = svg.dataset.frame.split(',').map(Number);
  const full = svg.dataset.x.split(',').map(Number), [y0, y1] = svg.dataset.y.split(',').map(Number);
  let [x0, x1] = full, from = null;
  const lines = [...svg.querySelectorAll('polyline')].map(line => ({line, name: line.dataset.name,
    points: line.getAttribute('points').split(' ').map(pair => pair.split(',').map(Number))}));
  const step = px => x0 + (px - left) / (right - left) * (x1 - x0);
  const value = py => y0 + (bottom - py) / (bottom - top) * (y1 - y0);
  const place = px => left + (full[0] + (px - left) / (right - left) * (full[1] - full[0]) - x0)
    / ((x1 - x0) || 1) * (right - left);
  const tip = svg.parentNode.querySelector('.tip'), bar = svg.querySelector('.bar');
  const at = event => { const box = svg.getBoundingClientRect();
    return Math.min(right, Math.max(left, (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width)); };
  const number = y => Math.abs(y) >= 1e5 || (y && Math.abs(y) < 1e-3) ? y.toExponential(2) : +y.toPrecision(4);
  svg.addEventListener('pointermove', event => {
    const px = at(event), told = [];
    bar.setAttribute('x1', px); bar.setAttribute('x2', px); bar.style.display = 'block';
    lines.forEach(({name, points}) => { if (!name) return;
      const near = points.reduce((a, b) => Math.abs(place(b[0]) - px) < Math.abs(place(a[0]) - px) ? b : a);
      told.push(name + ' ' + number(value(near[1]))); });
    tip.textContent = 'step ' + Math.round(step(px)) + ': ' + told.join(' \\u00b7 ');
  });
  svg.addEventListener('pointerleave', () => { bar.style.display = 'none'; tip.textContent = ''; from = null; });
  const draw = () => { lines.forEach(({line, points}) => line.setAttribute('points',
      points.map(([x, y]) => place(x).toFixed(1) + ',' + y).join(' ')));
    svg.querySelectorAll('.step').forEach((text, i) => text.textContent = Math.round([x0, (x0 + x1) / 2, x1][i])); };
  svg.addEventListener('pointerdown', event => { from = step(at(event)); event.preventDefault(); });
  svg.addEventListener('pointerup', event => { const to = step(at(event));
    if (from !== null && Math.abs(to - from) > (x1 - x0) / 50) {
      [x0, x1] = [Math.min(from, to), Math.max(from, to)]; draw(); }
    from = null; });
  svg.addEventListener('dblclick', () => { [x0, x1] = full; draw(); });
});
"""
HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
# A second lock behind `html`: should markup ever get through, the browser runs none of it and fetches nothing.
POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    f"content=\"default-src 'none'; script-src 'sha256-{HASH}'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'\">"
)


def page(title: str, style: str, body: str, *, refresh_s: int = 0) -> str:
    """A whole page; `title` and `body` are markup. `refresh_s`: how often a browser loads it again, 0: never."""
    head = f'<meta charset="utf-8">{POLICY}<meta name="viewport" content="width=device-width">'
    head += f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    head += f"<title>{title} · rlctl</title><style>{style}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{body}<script>{SCRIPT}</script></body></html>\n"

"""The look of `report.html`, light and dark."""

STYLE = """
:root { --bg:#fff; --ink:#1d2433; --soft:#6b7486; --rule:#e4e8ee; --card:#f8f9fb;
  --c0:#2563eb; --c1:#ea7317; --c2:#12936b; --c3:#b5338a; --c4:#8a6d00; --c5:#64748b;
  --c6:#7c3aed; --c7:#be123c; --bad:#c0392b; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --bg:#12151c; --ink:#e6e9f0; --soft:#97a1b3;
  --rule:#2a303c; --card:#191d26; --c0:#6ea0ff; --c1:#ff9d4d; --c2:#3fcf9f; --c3:#ee7fc8;
  --c4:#d9b93b; --c5:#8b98ad;
  --c6:#b794ff; --c7:#ff7d97; --bad:#ff8a7a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1440px; padding: 24px 28px 60px; background: var(--bg); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 24px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 36px 0 10px; }
a { color: var(--c0); text-decoration: none; } a:hover { text-decoration: underline; }
nav, .note, small { color: var(--soft); } small { margin-left: 8px; font-weight: 400; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 20px 0; }
.tiles div, figure { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.tiles div { padding: 10px 14px; } dt { color: var(--soft); font-size: 12px; }
dd { margin: 0; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(360px, 100%), 1fr)); gap: 14px;
  margin-top: 20px; }
figure { margin: 0; padding: 12px 14px 8px; } figcaption { font-weight: 600; } figure p { margin: 2px 0 0; }
svg { width: 100%; display: block; } .grid { stroke: var(--rule); stroke-width: 1; }
.tick { fill: var(--soft); font-size: 10.5px; font-variant-numeric: tabular-nums; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .line.raw { opacity: .32; stroke-width: 1; }
.band { opacity: .8; } .key { display: inline-block; margin-right: 14px; color: var(--soft); font-size: 12px; }
.key b { color: var(--ink); }
.key i { display: inline-block; width: 9px; height: 9px; border-radius: 3px; margin-right: 5px; }
.line.s0 { stroke: var(--c0); } .line.s1 { stroke: var(--c1); } .line.s2 { stroke: var(--c2); }
.line.s3 { stroke: var(--c3); }
.dot.s0 { fill: var(--c0); } .dot.s1 { fill: var(--c1); } .dot.s2 { fill: var(--c2); } .dot.s3 { fill: var(--c3); }
i.s0, i.b0 { background: var(--c0); } i.s1, i.b1 { background: var(--c1); } i.s2, i.b2 { background: var(--c2); }
i.s3, i.b3 { background: var(--c3); } i.b4 { background: var(--c4); } i.b5 { background: var(--c5); }
.b0 { fill: var(--c0); } .b1 { fill: var(--c1); } .b2 { fill: var(--c2); } .b3 { fill: var(--c3); }
.b4 { fill: var(--c4); } .b5 { fill: var(--c5); }
@media (max-width: 600px) { body { padding: 16px 14px 40px; } .tiles { grid-template-columns: 1fr 1fr; } }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 12px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.45 ui-monospace, Menlo, Consolas, monospace; }
.failed { border: 1px solid var(--bad); border-radius: 10px; padding: 2px 16px 10px; margin: 16px 0; }
.failed h2 { margin: 10px 0; color: var(--bad); } .state { color: var(--soft); }
.warnings { padding-left: 18px; } .filter input { margin: 0 4px 0 0; } .filter label { margin-right: 14px; }
.tip { float: right; font-size: 12px; font-weight: 400; color: var(--soft); font-variant-numeric: tabular-nums; }
svg { touch-action: pan-y; cursor: crosshair; user-select: none; }
svg.hidden { position: absolute; width: 0; height: 0; } .picked { fill: var(--soft); opacity: .15; display: none; }
.bar { stroke: var(--soft); stroke-width: .7; display: none; }
.line.s4 { stroke: var(--c4); } .line.s5 { stroke: var(--c5); } .line.s6 { stroke: var(--c6); }
.line.s7 { stroke: var(--c7); } .dot.s4 { fill: var(--c4); } .dot.s5 { fill: var(--c5); } .dot.s6 { fill: var(--c6); }
.dot.s7 { fill: var(--c7); } i.s4 { background: var(--c4); } i.s5 { background: var(--c5); }
i.s6, i.b6 { background: var(--c6); } i.s7, i.b7 { background: var(--c7); } i.b5 { background: var(--c5); }
.b6 { fill: var(--c6); } .b7 { fill: var(--c7); }
"""

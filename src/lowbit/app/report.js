
"use strict";
// Draws the charts of a report as SVG from the JSON beside each, and sorts its tables. All text is set as text.
(() => {
  const TONES = 7;
  const DASHES = 3;
  const TIP_LINES = 8;
  const SPARSE = 30; // points; of a curve that has no more, each is marked

  const build = (node, attributes, children) => {
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const html = (name, attributes = {}, ...children) => build(document.createElement(name), attributes, children);
  const svg = (name, attributes = {}, ...children) =>
    build(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
  const text = (x, y, words, kind = "") => svg("text", { x, y, class: kind }, words);
  const line = (x1, y1, x2, y2, kind) => svg("line", { x1, y1, x2, y2, class: kind });
  const toneOf = (tone) => `tone-${tone % TONES}`;
  const dashOf = (tone) => `dash-${Math.floor(tone / TONES) % DASHES}`;
  const known = (values) => values.filter((value) => value !== null && value !== undefined);
  const lowest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
  const highest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
  const nearest = (values, wanted) => {
    let best = -1;
    values.forEach((value, i) => {
      if (value !== null && (best < 0 || Math.abs(value - wanted) < Math.abs(values[best] - wanted))) best = i;
    });
    return best;
  };

  // Numbers as text: four digits, and a power of ten where zeros would hide them.
  const format = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && size < 1e-3) return value.toExponential(2).replace("e", " × 10^").replace(/\^(.+)$/, raised);
    return value.toLocaleString("en", size < 1e4 ? { maximumSignificantDigits: 4 } : { maximumFractionDigits: 0 });
  };
  const SMALL = { ...["⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"], "-": "⁻", "+": "" };
  const raised = (_, power) => [...power].map((digit) => SMALL[digit]).join("");
  const percent = (share) => `${(100 * share).toLocaleString("en", { maximumSignificantDigits: 3 })} %`;

  // A function from data to pixels, and the ticks of its axis.
  function axis(low, high, from, to, log, wanted) {
    if (low === high) {
      const room = Math.abs(low) / 2 || 0.5;
      [low, high] = log ? [low / 2, high * 2] : [low - room, high + room];
    }
    const turn = log ? Math.log10 : (value) => value;
    const place = (value) => from + ((turn(value) - turn(low)) / (turn(high) - turn(low))) * (to - from);
    const ticks = (log && logTicks(low, high, wanted)) || linearTicks(low, high, wanted);
    return { place, ticks, low, high };
  }
  function linearTicks(low, high, wanted) {
    const rough = (high - low) / Math.max(wanted, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const fixed = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    const words = high >= 1e4 ? { notation: "compact", maximumSignificantDigits: 3 } : fixed;
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
      const value = i === 0 ? 0 : i * step; // never -0
      ticks.push({ value, label: digits > 5 ? format(value) : value.toLocaleString("en", words) });
    }
    return ticks;
  }
  function logTicks(low, high, wanted) {
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const every = Math.max(1, Math.ceil((last - first) / (wanted + 1)));
    const enough = Math.min(3, wanted - 1);
    // The fewest of these that are enough; if none is, linear ones tell more.
    for (const factors of every > 1 ? [[1]] : [[1], [1, 2, 5], [1, 1.5, 2, 3, 5, 7]]) {
      const ticks = [];
      for (let power = first; power <= last; power += every) {
        for (const factor of factors) {
          const value = factor * 10 ** power;
          const inside = value >= low * 0.999 && value <= high * 1.001;
          if (inside) ticks.push({ value, label: powered(value, factor, power) });
        }
      }
      if (ticks.length >= enough) return ticks;
    }
    return null;
  }
  const powered = (value, factor, power) => {
    if (power >= -3 && power < 4) return value.toLocaleString("en", { maximumSignificantDigits: 2 });
    return `${factor === 1 ? "" : `${factor} × `}10${raised("", String(power))}`;
  };
  const widest = (labels) => Math.ceil(7 * highest([0, ...labels.map((label) => label.length)]));

  // Every chart is {root, stops, along, show}: stops are the pixels along x (or y) that have values, show(i, y) draws
  // the crosshair at stop i and gives what the tooltip says.
  const marked = (root) => {
    const marks = svg("g", { class: "marks" });
    root.append(marks);
    return marks;
  };

  function lines(spec, width, hidden) {
    const height = spec.height ?? (width < 480 ? 230 : 280);
    const fine = (y) => y !== null && (!spec.log || y > 0);
    const series = spec.series.map((one) => ({ ...one, y: one.y.map((y) => (fine(y) ? y : null)) }));
    const shown = series.filter((one) => !hidden.has(one.name));
    const ys = known(shown.flatMap((one) => one.y));
    const xs = known(shown.flatMap((one) => one.x));
    if (!ys.length || !xs.length) return empty(width, height);
    let [low, high] = spec.range ?? [lowest(ys), highest(ys)];
    if (!spec.range && !spec.log) {
      if (low > 0 && low < 0.4 * high) low = 0;
      const room = (high - low) * 0.05;
      [low, high] = [low === 0 ? 0 : low - room, high + room];
    }
    const [top, bottom] = [22, height - (spec.x ? 40 : 24)];
    const y = axis(low, high, bottom, top, spec.log, height < 200 ? 3 : 5);
    const left = spec.left ?? widest(y.ticks.map((tick) => tick.label)) + 8;
    const x = axis(lowest(xs), highest(xs), left, width - 8, false, Math.max(2, Math.floor(width / 90)));
    const root = frame(width, height);
    if (spec.band) {
      const [from, to] = spec.band.map(x.place);
      root.append(svg("rect", { x: from, y: top, width: to - from, height: bottom - top, class: "band" }));
    }
    yAxis(root, y, left, width - 8, spec.y);
    xAxis(root, x, bottom, spec.x);
    const over = [];
    for (const one of [...shown].reverse()) {
      const kind = one.faint ? "line faint" : `line ${toneOf(one.tone)} ${dashOf(one.tone)}`;
      root.append(svg("path", { d: path(one.x, one.y, x.place, y.place), class: one.smooth ? `${kind} raw` : kind }));
      if (one.smooth) over.push(svg("path", { d: path(one.x, smoothed(one.y), x.place, y.place), class: kind }));
      if (!one.faint && one.x.length <= SPARSE) {
        one.x.forEach((at, i) => {
          if (at === null || one.y[i] === null) return;
          const [cx, cy] = [x.place(at), y.place(one.y[i])];
          over.push(svg("circle", { cx, cy, r: 2.5, class: `fill ${toneOf(one.tone)}` }));
        });
      }
    }
    root.append(...over);
    const marks = marked(root);
    const values = [...new Set(xs)].sort((a, b) => a - b);
    const stops = values.map(x.place);
    const show = (i, pointer) => {
      marks.replaceChildren(line(stops[i], top, stops[i], bottom, "cross"));
      let found = shown.filter((one) => !one.faint).map((one) => {
        const at = nearest(one.x.map((value, j) => (one.y[j] === null ? null : value)), values[i]);
        return { one, at, away: at < 0 ? Infinity : Math.abs(y.place(one.y[at]) - (pointer ?? top)) };
      });
      found = found.filter(({ at }) => at >= 0).sort((a, b) => a.away - b.away);
      const left_out = found.length - TIP_LINES;
      found = found.slice(0, TIP_LINES).sort((a, b) => b.one.y[b.at] - a.one.y[a.at]);
      for (const { one, at } of found) {
        const [cx, cy] = [x.place(one.x[at]), y.place(one.y[at])];
        marks.append(svg("circle", { cx, cy, r: 4, class: `dot ${toneOf(one.tone)}` }));
      }
      const said = found.map(({ one, at }) => ({
        tone: one.tone,
        name: one.x[at] === values[i] ? one.name : `${one.name} (at ${format(one.x[at])})`,
        value: format(one.y[at]),
      }));
      if (left_out > 0) said.push({ name: `and ${left_out} more` });
      return { title: `${spec.x || "x"} ${format(values[i])}`, said };
    };
    return { root, stops, along: "x", show };
  }

  function rows(spec, width, hidden) {
    // On a phone a name stands above its row, else to its left.
    const narrow = width < 560;
    const shown = spec.rows.map((row) => ({ ...row, marks: row.marks.filter((mark) => !hidden.has(mark.series)) }));
    const all = shown.flatMap((row) => row.marks);
    const ends = known(all.flatMap((mark) => [mark.value, mark.low, mark.high]));
    if (!ends.length) return empty(width, 80);
    let [low, high] = [lowest(ends), highest(ends)];
    const room = (high - low) * 0.08 || 1;
    if (spec.zero) [low, high] = [Math.min(0, low), Math.max(0, high + (all[0].bar ? 0 : room))];
    else if (spec.unit !== "%") [low, high] = [low - room, high + room];
    else [low, high] = [Math.min(low, Math.max(low - room, 0)), Math.max(high, Math.min(high + room, 100))];
    const pitch = narrow ? 42 : 30;
    const [top, bottom] = [4, 4 + shown.length * pitch];
    const names = narrow ? 0 : Math.min(widest(shown.map((row) => row.name)) + 12, width * 0.4);
    const values = narrow ? 0 : widest(all.map((mark) => mark.text ?? ""));
    const right = width - 6 - (values && values + 8);
    const x = axis(low, high, narrow ? 1 : names + 10, right, false, Math.max(2, Math.floor((right - names) / 80)));
    const root = frame(width, bottom + 40);
    const stops = shown.map((_, i) => top + i * pitch + (narrow ? 28 : pitch / 2));
    // Lines stay clear of names above a row.
    const upright = (at, kind) => {
      const parts = narrow ? stops.map((middle) => [middle - 10, middle + 14]) : [[top, bottom]];
      root.append(...parts.map(([from, to]) => line(at, from, at, to, kind)));
    };
    for (const tick of x.ticks) upright(x.place(tick.value), "rule-line");
    xAxis(root, x, bottom, spec.x);
    if (spec.zero) upright(x.place(0), "base");
    shown.forEach((row, i) => {
      const middle = stops[i];
      const free = narrow ? width - widest(row.marks.map((mark) => mark.text ?? "")) : names;
      const name = shorten(row.name, Math.floor((free - 12) / 7));
      root.append(narrow ? text(0, middle - 13, name, "name") : text(names, middle + 4, name, "name end"));
      for (const mark of row.marks) {
        const [at, tone] = [x.place(mark.value), toneOf(mark.tone)];
        if (mark.bar) {
          const from = x.place(0);
          const box = { x: Math.min(from, at), y: middle - 7, width: Math.max(1, Math.abs(at - from)), height: 14 };
          root.append(svg("rect", { ...box, class: mark.faint ? "fill faint" : `fill ${tone}` }));
        } else {
          const [from, to] = [mark.low ?? mark.value, mark.high ?? mark.value].map(x.place);
          const whisker = `M${from} ${middle}H${to}M${from} ${middle - 5}v10M${to} ${middle - 5}v10`;
          if (to > from) root.append(svg("path", { d: whisker, class: `span ${tone}` }));
          root.append(svg("circle", { cx: at, cy: middle, r: 5.5, class: `dot ${tone}` }));
        }
        if (mark.text) root.append(text(width, narrow ? middle - 13 : middle + 4, mark.text, "end"));
      }
    });
    const marks = marked(root);
    const show = (i) => {
      marks.replaceChildren(svg("rect", { x: 0, y: top + i * pitch, width, height: pitch, class: "lit" }));
      const said = shown[i].marks.map((mark) => {
        const ends = known([mark.low, mark.high]).map(format);
        const interval = ends.length === 2 ? ` (${ends.join(" to ")})` : "";
        const value = mark.text ?? `${format(mark.value)} ${spec.unit}${interval}`;
        return { tone: mark.faint ? undefined : mark.tone, name: mark.series ?? spec.x, value };
      });
      return { title: shown[i].name, said };
    };
    return { root, stops, along: "y", show };
  }

  function histogram(spec, width) {
    const height = 180;
    const [top, strip] = [8, spec.codes.length ? 12 : 0];
    const bottom = height - 38 - strip;
    const { scale, zero, min, max } = spec.grid ?? {};
    const valueOf = (code) => (code - zero) * scale;
    const all = spec.counts
      .map((count, i) => ({ count, from: spec.edges[i], to: spec.edges[i + 1] }))
      .filter(({ from, to }) => from !== null && to !== null);
    // As far as the grid is wide to either side of it; what lies beyond is told by its number.
    const reach = spec.grid ? (max - min) * scale : Infinity;
    const [first, last] = spec.grid ? [valueOf(min) - reach, valueOf(max) + reach] : [-Infinity, Infinity];
    const bins = all.filter(({ from, to }) => to > first && from < last);
    if (!bins.length) return empty(width, height);
    const sum = (some) => some.reduce((total, bin) => total + bin.count, 0);
    const total = sum(all) || 1;
    const most = highest(bins.map((bin) => bin.count)) || 1;
    const log = logCounts() && most > 1;
    const ends = bins.flatMap(({ from, to }) => [from, to]);
    if (spec.grid) ends.push(valueOf(min - 0.5), valueOf(max + 0.5));
    const y = log ? axis(0.6, most, bottom, top, true, 3) : axis(0, most, bottom, top, false, 3);
    const left = 40;
    const x = axis(lowest(ends), highest(ends), left, width - 4, false, Math.max(2, Math.floor(width / 80)));
    const root = frame(width, height);
    if (spec.grid) {
      const [from, to] = [valueOf(min), valueOf(max)].map(x.place);
      root.append(svg("rect", { x: from, y: top, width: to - from, height: bottom - top, class: "band" }));
    }
    yAxis(root, y, left, width - 4, "");
    const tall = (count) => (count > 0 ? bottom - y.place(Math.max(count, y.low)) : 0);
    const bar = ({ count, from, to }) => `M${x.place(from)} ${bottom}v${-tall(count)}H${x.place(to)}V${bottom}z`;
    root.append(svg("path", { d: bins.map(bar).join(""), class: `fill ${toneOf(spec.tone)}` }));
    if (spec.grid) {
      // Lines closer than 4 pixels would be a wall: of such a grid every 2nd, 4th, 8th ... is drawn.
      const step = Math.abs(x.place(scale) - x.place(0));
      let every = 1;
      if (step < 4) while (every * step < 12) every *= 2;
      for (let code = min; code <= max; code++) {
        const at = x.place(valueOf(code));
        const kind = code === min || code === max ? "edge" : (code - zero) % every ? "" : "grid-line";
        if (kind) root.append(line(at, top, at, bottom, kind));
      }
      drawStrip(root, spec, x, valueOf, bottom + 2, strip);
    }
    xAxis(root, x, bottom + strip, spec.x);
    const [before, after] = [sum(all.filter(({ to }) => to <= first)), sum(all.filter(({ from }) => from >= last))];
    if (before) root.append(text(left + 4, top + 12, `← ${format(before)}`, "halo"));
    if (after) root.append(text(width - 6, top + 12, `${format(after)} →`, "halo end"));
    const marks = marked(root);
    const stops = bins.map(({ from, to }) => x.place((from + to) / 2));
    const show = (i) => {
      const { count, from, to } = bins[i];
      const box = { x: x.place(from), y: top, width: Math.max(1, x.place(to) - x.place(from)), height: bottom - top };
      marks.replaceChildren(svg("rect", { ...box, class: "lit" }), line(stops[i], top, stops[i], bottom, "cross"));
      const said = [{ name: "values", value: `${format(count)} (${percent(count / total)})` }];
      if (spec.grid) {
        const code = Math.min(max, Math.max(min, Math.round((from + to) / 2 / scale) + zero));
        said.push({ name: `code ${code}`, value: `= ${format(valueOf(code))}` });
        if (spec.codes.length) said.push({ name: `values with code ${code}`, value: format(spec.codes[code - min]) });
      }
      const ends = [from, to].map((end) => format(Math.abs(end) < (to - from) / 1000 ? 0 : end));
      return { title: `${spec.x} ${ends.join(" to ")}`, said };
    };
    return { root, stops, along: "x", show };
  }

  function drawStrip(root, spec, x, valueOf, top, strip) {
    if (!strip) return;
    const { min, max } = spec.grid;
    const most = highest(spec.codes);
    const cell = (first, last, gap) => {
      const [from, to] = [x.place(valueOf(first - 0.5)), x.place(valueOf(last + 0.5))];
      return { x: from, y: top, width: to - from - (to - from > 5 ? gap : 0), height: strip - 4 };
    };
    spec.codes.forEach((count, i) => {
      const opacity = (0.2 + (0.8 * Math.log1p(count)) / Math.log1p(most)).toFixed(2);
      const box = cell(min + i, min + i, 1);
      if (count) root.append(svg("rect", { ...box, opacity, class: `fill ${toneOf(spec.tone)}` }));
    });
    root.append(svg("rect", { ...cell(min, max, 0), fill: "none", class: "rule-line" }));
  }

  const frame = (width, height) =>
    svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
  const empty = (width, height) => {
    const root = frame(width, height);
    root.append(text(width / 2, height / 2, "nothing to draw", "middle"));
    return { root, stops: [], along: "x", show: () => null };
  };
  function yAxis(root, y, left, right, label) {
    for (const tick of y.ticks) {
      const at = y.place(tick.value);
      root.append(line(left, at, right, at, "rule-line"), text(left - 6, at + 4, tick.label, "end"));
    }
    if (label) root.append(text(0, 11, label));
  }
  function xAxis(root, x, bottom, label) {
    const [from, to] = [x.place(x.low), x.place(x.high)];
    root.append(line(from, bottom, to, bottom, "base"));
    if (label) root.append(text(to, bottom + 34, label, "end"));
    for (const tick of x.ticks) {
      const at = x.place(tick.value);
      root.append(line(at, bottom, at, bottom + 4, "base"), text(at, bottom + 18, tick.label, "middle"));
    }
  }
  // The mean of the points around each: of fewer near the ends, so that these stay where they are.
  function smoothed(ys) {
    const most = Math.ceil(ys.length / 60);
    return ys.map((y, i) => {
      const reach = Math.min(most, i, ys.length - 1 - i);
      const around = known(ys.slice(i - reach, i + reach + 1));
      return y === null ? null : around.reduce((sum, value) => sum + value, 0) / around.length;
    });
  }
  function path(xs, ys, placeX, placeY) {
    let [d, pen] = ["", "M"];
    xs.forEach((x, i) => {
      if (x === null || ys[i] === null) pen = "M";
      else {
        d += `${pen}${placeX(x).toFixed(1)} ${placeY(ys[i]).toFixed(1)}`;
        pen = "L";
      }
    });
    return d;
  }
  // The end of a layer's path tells more than its beginning.
  const shorten = (name, most) => (name.length <= most ? name : `…${name.slice(-Math.max(most - 1, 3))}`);

  const tip = document.getElementById("tip");
  const spoken = document.getElementById("spoken");
  const swatch = (tone, kind) => {
    const root = svg("svg", { width: 16, height: 10, "aria-hidden": "true" });
    if (kind === "lines") root.append(line(1, 5, 15, 5, `span ${toneOf(tone)} ${dashOf(tone)}`));
    else root.append(svg("circle", { cx: 8, cy: 5, r: 5, class: `fill ${toneOf(tone)}` }));
    return root;
  };
  function tell({ title, said }, kind, x, y) {
    const found = said.map(({ tone, name, value }) => {
      const row = html("div", {}, html("span", {}, shorten(name, 36)), html("em", {}, value ?? ""));
      if (tone !== undefined) row.prepend(swatch(tone, kind));
      return row;
    });
    tip.replaceChildren(html("b", {}, title), ...found);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = x + 14 + width > innerWidth - 8 ? x - 14 - width : x + 14;
    const top = y + 14 + height > innerHeight - 8 ? y - 14 - height : y + 14;
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    tip.style.top = `${Math.max(8, top)}px`;
  }

  const KINDS = { lines, rows, histogram };
  const logBox = document.getElementById("log-counts");
  const logCounts = () => logBox.checked;
  const charts = [];
  let active = null;

  function mount(figure) {
    const spec = JSON.parse(figure.querySelector("script").textContent);
    const plot = figure.querySelector(".plot");
    const hidden = new Set();
    let [chart, width, at] = [null, 0, -1];
    const draw = () => {
      chart = KINDS[spec.kind](spec, width, hidden);
      plot.replaceChildren(chart.root);
      at = -1;
    };
    const fit = () => {
      const now = Math.floor(plot.clientWidth);
      if (now && now !== width) {
        width = now;
        draw();
      }
    };
    const hide = () => {
      if (at < 0) return;
      at = -1;
      plot.querySelector(".marks")?.replaceChildren();
      tip.hidden = true;
      active = null;
    };
    const show = (i, pointer) => {
      if (active && active !== hide) active();
      active = hide;
      at = i;
      const box = plot.getBoundingClientRect();
      const found = chart.show(i, pointer && pointer.clientY - box.top);
      const [x, y] = chart.along === "x" ? [chart.stops[i], box.height / 3] : [box.width / 2, chart.stops[i]];
      tell(found, spec.kind, pointer?.clientX ?? box.left + x, pointer?.clientY ?? box.top + y);
      return found;
    };
    const follow = (event) => {
      if (!chart?.stops.length) return;
      const box = plot.getBoundingClientRect();
      show(nearest(chart.stops, chart.along === "x" ? event.clientX - box.left : event.clientY - box.top), event);
    };
    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", follow);
    // A finger that is lifted has left too, but what it asked for stays.
    plot.addEventListener("pointerleave", (event) => event.pointerType === "touch" || hide());
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const last = (chart?.stops.length ?? 0) - 1;
      const steps = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last };
      const to = steps[event.key];
      if (event.key === "Escape") hide();
      if (to === undefined || last < 0) return;
      event.preventDefault();
      const { title, said } = show(Math.min(last, Math.max(0, to)));
      spoken.textContent = [title, ...said.map(({ name, value }) => `${name} ${value ?? ""}`)].join(", ");
    });
    legend(figure.querySelector(".legend"), spec, hidden, draw);
    // In a frame of its own: a drawing changes the height that the observer watches.
    new ResizeObserver(() => requestAnimationFrame(fit)).observe(plot);
    charts.push({ spec, fit, draw: () => width && draw() });
  }

  function legend(box, spec, hidden, draw) {
    const entries = new Map();
    if (spec.legend !== false) for (const { name, tone } of spec.series ?? []) entries.set(name, tone);
    for (const { series, tone } of (spec.rows ?? []).flatMap((row) => row.marks)) if (series) entries.set(series, tone);
    if (entries.size < 2) return;
    for (const [name, tone] of entries) {
      const button = html("button", { type: "button", "aria-pressed": "true" }, swatch(tone, spec.kind), name);
      button.addEventListener("click", () => {
        const off = !hidden.delete(name);
        if (off) hidden.add(name);
        button.setAttribute("aria-pressed", String(!off));
        draw();
      });
      box.append(button);
    }
  }

  document.querySelectorAll("figure.chart").forEach(mount);
  logBox?.addEventListener("change", () => charts.forEach(({ spec, draw }) => spec.kind === "histogram" && draw()));
  document.addEventListener("pointerdown", (event) => active && !event.target.closest(".plot") && active());
  addEventListener("scroll", () => active?.(), { passive: true });
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((details) => (details.open = true));
    charts.forEach(({ fit }) => fit());
  });

  // Names in the order people expect (layer 2 before layer 10), numbers before names, nothing last.
  const { compare } = new Intl.Collator("en", { numeric: true });
  const keyOf = (cell) => (cell.dataset.v !== undefined ? Number(cell.dataset.v) : cell.textContent);
  const order = (a, b) => {
    if (typeof a === typeof b) return typeof a === "number" ? (a < b ? -1 : Number(a > b)) : compare(a, b);
    return typeof a === "number" ? -1 : 1;
  };
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.addEventListener("click", () => {
      const down = head.ariaSort === "ascending";
      for (const other of heads) other.ariaSort = "none";
      head.ariaSort = down ? "descending" : "ascending";
      const keyed = [...table.tBodies[0].rows].map((row) => [keyOf(row.cells[column]), row]);
      keyed.sort(([a], [b]) => Number(a === "–") - Number(b === "–") || (down ? order(b, a) : order(a, b)));
      table.tBodies[0].append(...keyed.map(([, row]) => row));
    }));
  }
})();

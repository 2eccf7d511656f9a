"use strict";
// Formulas of docs/cost-model.md for one layer of one rank, in seconds and tokens; padding is not counted.
const hdpFormulas = {
  // Passing on a slice of so many tokens: keys and values, those with gradients, gradients.
  passing(layer, tokens) {
    const { latency, kv, gradient } = layer;
    return { kv: latency + kv * tokens, both: latency + (kv + gradient) * tokens, gradient: latency + gradient * tokens };
  },
  // Attention of a ring of so many ranks whose every step computes so long and passes on so many tokens.
  walk(layer, step, tokens, ring) {
    const factor = layer.backward;
    if (ring < 2) return step + factor * step;
    const pass = this.passing(layer, tokens);
    const forward = (ring - 1) * Math.max(step, pass.kv) + step;
    const back = factor * step;
    const backward = Math.max(back, pass.kv) + (ring - 2) * Math.max(back, pass.both) + Math.max(back, pass.gradient) + pass.gradient;
    return forward + backward;
  },
  // One sequence alone on its ring.
  own(layer, length, ring) {
    const piece = length / ring;
    return this.walk(layer, layer.attention * piece * piece, piece, ring);
  },
  // Sequences [length, count] cut together over one ring, in one slice per step.
  pack(layer, sequences, ring) {
    let step = 0;
    let tokens = 0;
    for (const [length, count] of sequences) {
      step += (count * layer.attention * length * length) / (ring * ring);
      tokens += (count * length) / ring;
    }
    return this.walk(layer, step, tokens, ring);
  },
  // Tokens of the smallest piece that hides every transfer of a ring of three or more.
  smallestPiece(layer) {
    const least = (attention, perToken) =>
      attention > 0 ? (perToken + Math.sqrt(perToken * perToken + 4 * attention * layer.latency)) / (2 * attention) : Infinity;
    const forward = least(layer.attention, layer.kv);
    return { forward: forward, both: Math.max(forward, least(layer.backward * layer.attention, layer.kv + layer.gradient)) };
  },
  smallestRing(length, capacity) {
    return Math.ceil(length / capacity);
  },
  // The static mesh: one ring that holds the longest sequence allowed.
  staticRing(state) {
    return Math.max(1, Math.ceil(state.context / state.capacity));
  },
  // Rank-seconds of attention of a whole step: [static, HDP].
  step(state, lengths, counts) {
    const ring = this.staticRing(state);
    const room = ring * state.capacity;
    const sequences = lengths.map((length, index) => [Math.min(length, state.context), counts[index]]);
    let hdp = 0;
    for (const [length, count] of sequences) {
      const own = this.smallestRing(length, state.capacity);
      hdp += count * own * this.own(state, length, own);
    }
    let total = 0;
    for (const pack of this.packs(sequences, room)) total += ring * this.pack(state, pack, ring);
    return [total, hdp];
  },
  // Longest first into the first pack with room; [length, count] each. Equal lengths go together.
  packs(sequences, room) {
    const open = [];
    for (let index = sequences.length - 1; index >= 0; index -= 1) {
      const length = sequences[index][0];
      let left = sequences[index][1];
      for (const pack of open) {
        if (left === 0) break;
        const fit = Math.min(left, Math.floor((room - pack.used) / length));
        if (fit < 1) continue;
        pack.held.push([length, fit]);
        pack.used += fit * length;
        left -= fit;
      }
      while (left > 0) {
        const fit = Math.min(left, Math.max(1, Math.floor(room / length)));
        open.push({ used: fit * length, held: [[length, fit]] });
        left -= fit;
      }
    }
    return open.map((pack) => pack.held);
  },
};

// The panel: sliders, answers, two charts; `draw(element, chart)` draws.
function whatIf(panel, start, draw) {
  const STEPS = { block: 64, transfer: 64, capacity: 4, context: 4 }; // stops of a slider per doubling
  const RANGE = { block: [-5, 5], transfer: [-5, 5], capacity: [10, 18], context: [12, 24] }; // powers of two
  const sliders = Object.fromEntries([...panel.querySelectorAll("[data-slider]")].map((input) => [input.dataset.slider, input]));
  const output = (name) => panel.querySelector(`[data-output="${name}"]`);

  const short = (value) => {
    if (!Number.isFinite(value)) return "–";
    const digits = value === 0 ? 0 : Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
    return value.toLocaleString("en-US", { minimumFractionDigits: Math.min(digits, 9), maximumFractionDigits: Math.min(digits, 9) });
  };
  const time = (seconds) => (seconds >= 1 ? short(seconds) + " s" : seconds >= 1e-3 ? short(1e3 * seconds) + " ms" : short(1e6 * seconds) + " µs");
  const size = (tokens) => {
    const rounded = Math.round(tokens);
    for (const [unit, of] of [["M", 1 << 20], ["K", 1 << 10]]) if (rounded >= of && rounded % of === 0) return rounded / of + unit;
    return rounded.toLocaleString("en-US");
  };
  const count = (number) => Math.floor(number).toLocaleString("en-US");

  function reset() {
    for (const [name, input] of Object.entries(sliders)) {
      const [low, high] = RANGE[name];
      const middle = { block: 0, transfer: 0, capacity: Math.log2(start.capacity), context: Math.log2(start.context) }[name];
      input.min = Math.min(low, Math.floor(middle));
      input.max = Math.max(high, Math.ceil(middle));
      input.step = "any";
      input.value = middle;
    }
  }

  // What the sliders say. Tokens near to a stop are that stop, so that 8K can be met.
  function read() {
    const tokens = (name, own) => {
      const power = Number(sliders[name].value);
      if (Math.abs(power - Math.log2(own)) < 1e-9) return own;
      return Math.round(2 ** (Math.round(power * STEPS[name]) / STEPS[name]));
    };
    const compute = 2 ** Number(sliders.block.value);
    const link = 2 ** Number(sliders.transfer.value);
    const capacity = tokens("capacity", start.capacity);
    return {
      attention: start.attention * compute,
      backward: start.backward,
      latency: start.latency * link,
      kv: start.kv * link,
      gradient: start.gradient * link,
      capacity: capacity,
      context: Math.max(capacity, tokens("context", start.context)),
    };
  }

  function answers(state) {
    const block = state.attention * state.capacity * state.capacity;
    const transfer = hdpFormulas.passing(state, state.capacity).kv;
    const least = hdpFormulas.smallestPiece(state);
    const longest = Math.min(state.context, start.lengths[start.lengths.length - 1]);
    const ring = hdpFormulas.staticRing(state);
    const [fixed, hdp] = hdpFormulas.step(state, start.lengths, start.counts);
    output("block").textContent = time(block);
    output("transfer").textContent = time(transfer);
    output("capacity").textContent = size(state.capacity);
    output("context").textContent = size(state.context);
    sliders.block.setAttribute("aria-valuetext", time(block));
    sliders.transfer.setAttribute("aria-valuetext", time(transfer));
    sliders.capacity.setAttribute("aria-valuetext", size(state.capacity) + " tokens");
    sliders.context.setAttribute("aria-valuetext", size(state.context) + " tokens");
    const needed = hdpFormulas.smallestRing(longest, state.capacity);
    const widest = Math.max(1, Math.floor(longest / least.both));
    const full = state.capacity >= least.both;
    const lines = [
      `The smallest piece that hides its transfers has ${count(Math.ceil(least.both))} tokens (${count(Math.ceil(least.forward))} for the forward pass alone).`,
      full
        ? `A full piece of ${size(state.capacity)} tokens hides them: rings that are filled by one sequence do not wait.`
        : `Even a full piece of ${size(state.capacity)} tokens does not: every ring waits for its links. Raise the capacity.`,
      `The longest sequence here, ${count(longest)} tokens, needs at least ${count(needed)} ranks, and hides its transfers on up to ${count(widest)}.`,
      `Attention of all sequences of the step, spread evenly over ${count(start.ranks)} ranks: ${time(fixed / start.ranks)} a layer with static rings of ${count(ring)}, ` +
        `${time(hdp / start.ranks)} with HDP rings${hdp > 0 ? ", " + short(fixed / hdp) + " times less" : ""}.`,
    ];
    const list = panel.querySelector("[data-answers]");
    list.replaceChildren(...lines.map((line) => Object.assign(document.createElement("li"), { textContent: line })));
    return { least: least, ring: ring, ratio: fixed / hdp };
  }

  function lengthsOf(state) {
    const found = [];
    for (let power = 8; 2 ** power < state.context; power += 0.25) found.push(Math.round(2 ** power));
    return [...found, state.context];
  }

  function table(name, columns, rows) {
    const place = panel.querySelector(`[data-table="${name}"]`);
    const make = (tag, text, scope) => {
      const cell = Object.assign(document.createElement(tag), { textContent: text });
      if (scope) cell.scope = scope;
      return cell;
    };
    const line = (cells, head) => {
      const row = document.createElement("tr");
      row.append(...cells.map((text, index) => (head ? make("th", text, "col") : index === 0 ? make("th", text, "row") : make("td", text))));
      return row;
    };
    const head = document.createElement("thead");
    const body = document.createElement("tbody");
    head.append(line(columns, true));
    body.append(...rows.map((cells) => line(cells, false)));
    place.replaceChildren(head, body);
  }

  const series = (name, x, y, colour, dash, unit) => ({
    type: "scatter",
    mode: "lines",
    name: name,
    x: x,
    y: y,
    line: { color: colour, dash: dash, width: 2.5 },
    hovertemplate: "%{x:,} tokens: %{y:.4g} " + unit + "<extra>" + name + "</extra>",
  });
  const tokensAxis = (x) => {
    const powers = x.map((length) => Math.log2(length)).filter((power) => Number.isInteger(power) && power % 2 === 0);
    return { type: "log", title: { text: "sequence length, tokens" }, tickvals: powers.map((power) => 2 ** power), ticktext: powers.map((power) => size(2 ** power)) };
  };

  function update() {
    const state = read();
    const { least, ring, ratio } = answers(state);
    const x = lengthsOf(state);
    const smallest = x.map((length) => hdpFormulas.smallestRing(length, state.capacity));
    const widest = x.map((length) => Math.max(1, Math.floor(length / least.both)));
    const heading = (name, text) => (panel.querySelector(`[data-heading="${name}"]`).textContent = text);
    const both = x.filter((_, index) => smallest[index] > 1 && widest[index] >= smallest[index]).length;
    const shared = smallest.filter((size) => size > 1).length;
    heading(
      "rings",
      shared === 0
        ? "Every sequence fits one rank: no ring is needed"
        : both === shared
          ? `Rings from ${count(Math.ceil(least.both))} tokens per rank hide their transfers: HDP's smallest rings all do`
          : both === 0
            ? `Only pieces of ${count(Math.ceil(least.both))} tokens hide their transfers, and a rank holds ${size(state.capacity)}: every ring waits`
            : `Rings from ${count(Math.ceil(least.both))} tokens per rank hide their transfers: some of HDP's smallest rings do not`
    );
    draw(panel.querySelector(`#${panel.id}-rings .plot`), {
      traces: [
        series("smallest ring that holds it", x, smallest, "#0b3c6f", "solid", "ranks"),
        series("widest ring that hides its transfers", x, widest, "#d55e00", "dash", "ranks"),
        series("static ring", x, x.map(() => ring), "#202020", "dot", "ranks"),
      ],
      layout: { xaxis: tokensAxis(x), yaxis: { type: "log", title: { text: "ranks" }, rangemode: "tozero", dtick: 1 } },
      height: 360,
      narrow: 340,
    });
    table("rings", ["sequence, tokens", "smallest ring", "widest hiding ring", "static ring"], x.filter((_, i) => i % 4 === 0 || i === x.length - 1).map((length) => [size(length), count(hdpFormulas.smallestRing(length, state.capacity)), count(Math.max(1, length / least.both)), count(ring)]));
    const fixed = x.map((length) => 1e3 * hdpFormulas.pack(state, [[length, (ring * state.capacity) / length]], ring));
    const hdp = x.map((length, index) => 1e3 * (state.capacity / (length / smallest[index])) * hdpFormulas.own(state, length, smallest[index]));
    heading("time", `Attention of the whole step: HDP's rings need ${Number.isFinite(ratio) ? short(ratio) : "–"} times less than static rings of ${count(ring)} ranks`);
    draw(panel.querySelector(`#${panel.id}-time .plot`), {
      traces: [series("static rings", x, fixed, "#d55e00", "dash", "ms"), series("HDP rings", x, hdp, "#0b3c6f", "solid", "ms")],
      layout: { xaxis: tokensAxis(x), yaxis: { type: "log", title: { text: "ms per layer" }, dtick: 1 } },
      height: 360,
      narrow: 340,
    });
    table("time", ["sequences, tokens", "static, ms", "HDP, ms"], x.map((length, i) => [size(length), short(fixed[i]), short(hdp[i])]).filter((_, i) => i % 4 === 0 || i === x.length - 1));
  }

  reset();
  update();
  let next = 0;
  const soon = () => {
    cancelAnimationFrame(next);
    next = requestAnimationFrame(update);
  };
  for (const input of Object.values(sliders)) input.addEventListener("input", soon);
  panel.querySelector("[data-reset]").addEventListener("click", () => {
    reset();
    soon();
  });
}

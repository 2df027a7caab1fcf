// Numbers as text, and the ticks of axes.

const UNITS = {
  bytes: [[2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"], [1, " B"]],
  seconds: [[3600, " h"], [60, " min"], [1, " s"], [1e-3, " ms"]],
  percent: [[0.01, "%"]],
  count: [[1e9, " G"], [1e6, " M"], [1e4, " k", 1e3], [1, ""]],
  number: [[1, ""]],
};

// The unit for a value of this size: [factor, name]. Minutes and hours are used from two on.
function unitFor(size, kind) {
  const reach = kind === "seconds" ? 2 : 1;
  const units = UNITS[kind] ?? UNITS.number;
  const found = units.find(([worth]) => size >= worth * (worth >= 60 ? reach : 1)) ?? units.at(-1);
  return [found[2] ?? found[0], found[1]];
}

function plainNumber(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return value.toExponential(1).replace("e+", "e").replace("-", "−");
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 0.1 ? 3 : 4;
  return value.toLocaleString("en", { maximumFractionDigits: digits }).replace("-", "−");
}

// One decimal, ties to even as in Python, so that page and terminal show the same percentage.
function oneDecimal(value) {
  const tie = Number.isInteger(value * 4) && Math.abs(value * 10 % 2) === 0.5;
  return (tie ? Math.trunc(value * 10) / 10 : value).toFixed(1);
}

function formatValue(value, kind) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  const [worth, name] = unitFor(Math.abs(value), kind);
  const scaled = kind === "percent" ? value * 100 : value / worth;  // times 100, as in Python
  if (kind === "count" && name) return scaled.toFixed(1) + name;
  if (kind === "percent") {
    const small = scaled !== 0 && Math.abs(scaled) < 1;
    return (small ? plainNumber(Number(scaled.toPrecision(2))) : oneDecimal(scaled).replace("-", "−")) + name;
  }
  return (name && Math.abs(scaled) >= 1 ? scaled.toLocaleString("en", { maximumSignificantDigits: 4 })
    : plainNumber(scaled)) + name;
}

// A duration in readable units.
function formatDuration(seconds) {
  if (seconds === null || seconds < 120) return formatValue(seconds, "seconds");
  if (seconds < 600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min`
    : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

function niceTicks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const width = power * [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / width - 1e-9); i * width <= high + width * 1e-9; i++) ticks.push(i * width
    || 0);
  return [ticks, width];
}

// With as many digits as are needed to distinguish neighbouring ticks.
function exactTick(value, width) {
  if (value === 0) return "0";
  const digits = [0, 1, 2, 3, 4, 5].find((n) => Math.abs(Number(value.toExponential(n)) - value) < width * 1e-6);
  return value.toExponential(digits ?? 6).replace("e+", "e").replaceAll("-", "−");
}

function linearTicks(low, high, kind) {
  const [worth, name] = unitFor(Math.max(Math.abs(low), Math.abs(high)), kind);
  const wanted = kind === "count" ? Math.min(4.5, (high - low) / worth) : 4.5;  // counts are integers
  const [ticks, width] = niceTicks(low / worth, high / worth, wanted);
  const largest = Math.max(Math.abs(low), Math.abs(high)) / worth;
  const fine = [0, 1, 2, 3, 4, 5, 6, 7].find((n) =>
    Math.abs(width * 10 ** n - Math.round(width * 10 ** n)) < 1e-6);
  const digits = fine ?? 8;
  const format = (tick) => largest < 1e-3 || largest >= 1e6
    ? exactTick(Math.abs(tick) < width / 2 ? 0 : tick, width)
    : tick.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return ticks.map((tick) => [tick * worth, (format(tick) + name).replaceAll("-", "−")]);
}

function logTicks(low, high, kind) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first) / 4));
  const ticks = [];
  for (let power = first; power <= last; power += every) ticks.push(10 ** power);
  if (ticks.length < 2) for (const m of [2, 3, 5, 20, 30, 50]) ticks.push(m * 10 ** (first - 1));
  const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return inside.map((tick) => [tick, kind === "number" ? plainNumber(tick) : formatValue(tick, kind)]);
}

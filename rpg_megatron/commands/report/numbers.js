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

const DIGITS = [1, 2, 2.5, 5], POWERS = Array.from({ length: 28 }, (_, i) => i - 12);
const INCREMENTS = POWERS.flatMap((power) => DIGITS.map((digit) => Number(`${digit}e${power}`)));

// Distances of ticks on an axis with these ends, ascending: round in its unit, such as 0.5 GiB.
function increments(low, high, kind) {
  const [worth] = unitFor(Math.max(Math.abs(low), Math.abs(high)), kind);
  const unit = Number.isInteger(Math.log10(worth)) ? 1 : worth;
  return INCREMENTS.map((size) => size * unit).filter((size) => kind !== "count" || Number.isInteger(size));
}

// With as many digits as are needed to distinguish neighbouring ticks.
function tickTexts(ticks, increment, kind) {
  const largest = Math.max(...ticks.map(Math.abs)), [worth, name] = unitFor(largest, kind);
  const width = increment / worth;
  const fewest = (fits) => [0, 1, 2, 3, 4, 5, 6, 7].find(fits) ?? 8;
  const digits = fewest((n) => Math.abs(width * 10 ** n - Math.round(width * 10 ** n)) < 1e-6);
  const exact = (tick) => tick.toExponential(fewest((n) =>
    Math.abs(Number(tick.toExponential(n)) - tick) < width * 1e-6)).replace("e+", "e");
  const format = (tick) => (largest / worth < 1e-3 || largest / worth >= 1e6 ? tick && exact(tick)
    : tick.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  return ticks.map((tick) => (format(tick / worth) + name).replaceAll("-", "−"));
}

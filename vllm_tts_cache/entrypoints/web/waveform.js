// Drawing sound: bars on a canvas, in the colours of the style sheet.

const BAR_PIXELS = 3;
const GAP_PIXELS = 2;

/** The loudest sample of each of `count` equal parts. */
export function peaksOf(samples, count) {
  const peaks = new Float32Array(count);
  for (let part = 0; part < count; part++) {
    const end = Math.floor(((part + 1) * samples.length) / count);
    for (let i = Math.floor((part * samples.length) / count); i < end; i++) {
      peaks[part] = Math.max(peaks[part], Math.abs(samples[i]));
    }
  }
  return peaks;
}

/** How many bars fit. */
export const numBars = (canvas) =>
  Math.max(16, Math.floor((canvas.clientWidth || 300) / (BAR_PIXELS + GAP_PIXELS)));

/** Draw peaks in [0, 1]; those up to `share` of the width are those that were heard. */
export function draw(canvas, peaks, share = 0) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  const colours = ["--accent", "--wave"].map((name) => style.getPropertyValue(name).trim());
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const step = BAR_PIXELS + GAP_PIXELS;
  peaks.forEach((peak, i) => {
    const tall = Math.max(2, Math.sqrt(Math.min(1, peak)) * (height - 4));
    pen.fillStyle = i * step < share * peaks.length * step ? colours[0] : colours[1];
    pen.beginPath();
    pen.roundRect(i * step, (height - tall) / 2, BAR_PIXELS, tall, BAR_PIXELS / 2);
    pen.fill();
  });
}

/** Call again whenever what is drawn would look otherwise: its size, the colours. */
export function redrawn(canvas, paint) {
  const observer = new ResizeObserver(paint);
  observer.observe(canvas);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", paint);
  return () => {
    observer.disconnect();
    dark.removeEventListener("change", paint);
  };
}

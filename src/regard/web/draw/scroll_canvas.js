// A canvas that fills a scrolling frame and draws the part in view, so that a picture may be larger than any canvas.
// The frame has one child, which has the size of the picture and holds the canvas, and the canvas sticks to the frame.

export class ScrollCanvas {
  // draw(context, {width, height, left, top}): in CSS pixels, from the upper left corner of the view
  constructor(frame, draw) {
    [this.frame, this.draw] = [frame, draw];
    this.spacer = frame.firstElementChild;
    this.canvas = this.spacer.firstElementChild;
    this.frame.addEventListener("scroll", () => this.redraw(), { passive: true });
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(frame);
    this.onResize = () => {};
  }

  get view() {
    const { clientWidth: width, clientHeight: height, scrollLeft: left, scrollTop: top } = this.frame;
    return { width, height, left, top };
  }

  // The size of the whole picture.
  setSize(width, height) {
    this.spacer.style.width = `${Math.ceil(width)}px`;
    this.spacer.style.height = `${Math.ceil(height)}px`;
  }

  resize() {
    this.onResize();
    this.redraw();
  }

  // Draws once per frame of the screen, however often it is called.
  redraw() {
    this.request ??= requestAnimationFrame(() => {
      this.request = null;
      this.paint();
    });
  }

  paint() {
    const { width, height, left, top } = this.view;
    const ratio = window.devicePixelRatio || 1;
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== w || this.canvas.height !== h) {
      [this.canvas.width, this.canvas.height] = [w, h];
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    if (width && height) this.draw(context, { width, height, left, top });
  }

  remove() {
    cancelAnimationFrame(this.request);
    this.observer.disconnect();
  }
}

// Text that fits into a width, with an ellipsis.
export function clip(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = Math.min(text.length, Math.ceil(width / 4));
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}

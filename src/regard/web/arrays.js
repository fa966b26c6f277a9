// Arrays that the server sends as bytes: a uint32 with the length of a JSON header, the header, then the arrays that
// it lists, each padded to 8 bytes. They are views of the buffer; nothing is copied.

const TYPES = { uint8: Uint8Array, float32: Float32Array };

export function decodeArrays(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  let offset = 4 + size;
  for (const { name, type, shape } of header.arrays) {
    header[name] = new TYPES[type](buffer, offset, shape.reduce((product, count) => product * count, 1));
    header[name].shape = shape;
    offset += Math.ceil(header[name].byteLength / 8) * 8;
  }
  return header;
}

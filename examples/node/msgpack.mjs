// What a msgpack package would give: texts, numbers, booleans, null, bytes, lists and maps.

const sized = (tag, length) => {
  const head = Buffer.alloc(5);
  head[0] = tag;
  head.writeUInt32BE(length, 1);
  return head;
};

export function encode(value) {
  if (value === null) return Buffer.from([0xc0]);
  if (typeof value === "boolean") return Buffer.from([value ? 0xc3 : 0xc2]);
  if (Buffer.isBuffer(value)) return Buffer.concat([sized(0xc6, value.length), value]);
  if (typeof value === "string") {
    const bytes = Buffer.from(value);
    return Buffer.concat([sized(0xdb, bytes.length), bytes]);
  }
  if (typeof value === "number") {
    const bytes = Buffer.alloc(9);
    bytes[0] = Number.isSafeInteger(value) ? 0xd3 : 0xcb;
    if (bytes[0] === 0xd3) bytes.writeBigInt64BE(BigInt(value), 1);
    else bytes.writeDoubleBE(value, 1);
    return bytes;
  }
  if (Array.isArray(value)) return Buffer.concat([sized(0xdd, value.length), ...value.map(encode)]);
  const pairs = Object.entries(value).filter(([, item]) => item !== undefined);
  return Buffer.concat([sized(0xdf, pairs.length), ...pairs.flat().map(encode)]);
}

export function decode(bytes) {
  let at = 0;
  const take = (size) => bytes.subarray(at, (at += size));
  const unsigned = (size) => take(size).readUIntBE(0, size);
  const text = (size) => take(size).toString();
  const list = (size) => Array.from({ length: size }, value);
  const map = (size) => Object.fromEntries(Array.from({ length: size }, () => [value(), value()]));
  const forms = {
    0xc0: () => null, 0xc2: () => false, 0xc3: () => true,
    0xc4: () => take(unsigned(1)), 0xc5: () => take(unsigned(2)), 0xc6: () => take(unsigned(4)),
    0xca: () => take(4).readFloatBE(), 0xcb: () => take(8).readDoubleBE(),
    0xcc: () => unsigned(1), 0xcd: () => unsigned(2), 0xce: () => unsigned(4),
    0xcf: () => Number(take(8).readBigUInt64BE()),
    0xd0: () => take(1).readInt8(), 0xd1: () => take(2).readInt16BE(), 0xd2: () => take(4).readInt32BE(),
    0xd3: () => Number(take(8).readBigInt64BE()),
    0xd9: () => text(unsigned(1)), 0xda: () => text(unsigned(2)), 0xdb: () => text(unsigned(4)),
    0xdc: () => list(unsigned(2)), 0xdd: () => list(unsigned(4)),
    0xde: () => map(unsigned(2)), 0xdf: () => map(unsigned(4)),
  };
  function value() {
    const tag = unsigned(1);
    if (tag < 0x80) return tag;
    if (tag < 0x90) return map(tag & 0x0f);
    if (tag < 0xa0) return list(tag & 0x0f);
    if (tag < 0xc0) return text(tag & 0x1f);
    if (tag > 0xdf) return tag - 0x100;
    if (!(tag in forms)) throw new Error(`no form of msgpack that is used here: ${tag}`);
    return forms[tag]();
  }
  return value();
}

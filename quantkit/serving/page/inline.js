"use strict";
// Markdown within a line: emphasis, code, links. Time is linear in the text, whatever the text is.

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const MATH = [["$$", "$$"], ["\\(", "\\)"], ["\\[", "\\]"]];
const MAX_EMPHASIS = 16, MAX_ADDRESS = 2000, MAX_MATH = 300;
const DESTINATION = new RegExp(
  String.raw`^\(\s{0,9}(?:<([^<>\n]*)>|([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*))`
  + String.raw`(?:\s{1,9}(?:"[^"\n]*"|'[^'\n]*'))?\s{0,9}\)`);
const PUNCTUATION = /[\p{P}\p{S}]/u;

// An address that may stand in a link, or null. A relative one would be one of this server.
function address(text) {
  try {
    const parsed = new URL(text);
    return SCHEMES.has(parsed.protocol) ? parsed.href : null;
  } catch { return null; }
}

function link(href, nodes) {
  const node = element("a", "", nodes);
  for (const inner of node.querySelectorAll("a")) inner.replaceWith(inner.textContent);
  node.href = href;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  node.title = href;
  return node;
}

// Text with line breaks → nodes.
function inline(text) { return new InlineParser(text).parse(); }

class InlineParser {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.parts = [];       // text, nodes and runs of delimiters
    this.brackets = [];    // where links may begin
    this.unclosed = new Set();
  }

  parse() {
    const plain = /(?:[^\\`*_~[\]!<&$h\n]|h(?!ttps?:\/\/))+/y;
    while (this.at < this.text.length) {
      plain.lastIndex = this.at;
      const run = plain.exec(this.text);
      if (run) this.take(run[0].length, run[0]);
      else this.special(this.text[this.at]);
    }
    return emphasize(this.parts);
  }

  take(length, part) {
    this.at += length;
    this.parts.push(part);
  }

  special(char) {
    const rest = (rule) => { rule.lastIndex = this.at; return rule.exec(this.text); };
    let match;
    if (this.math()) return;
    if (char === "\n") this.take(1, element("br"));
    else if (char === "\\" && (match = rest(/\\([!-/:-@[-`{-~])/y))) this.take(2, match[1]);
    else if (char === "`") this.code();
    else if (char === "*" || char === "_" || (char === "~" && rest(/~~(?!~)/y))) this.delimiters(char);
    else if (char === "!" && this.text[this.at + 1] === "[") this.open(2, true);
    else if (char === "[") this.open(1, false);
    else if (char === "]") this.close();
    else if (char === "<" && (match = rest(/<br ?\/?>/iy))) this.take(match[0].length, element("br"));
    else if (char === "<" && (match = rest(/<([a-z]+:[^\s<>]{1,2000})>/iy)) && address(match[1])) {
      this.take(match[0].length, link(address(match[1]), [match[1]]));
    } else if (char === "&" && (match = rest(/&([a-z]{2,4});/y)) && ENTITIES[match[1]]) {
      this.take(match[0].length, ENTITIES[match[1]]);
    } else if (char === "h" && (match = rest(/https?:\/\/[^\s<>"'`*[\]]{1,2000}/y))) this.bare(match[0]);
    else this.take(1, char);
  }

  // Until `closing`; remembers what has none, so that it is looked for once.
  until(closing, from) {
    if (this.unclosed.has(closing)) return -1;
    const end = this.text.indexOf(closing, from);
    if (end < 0) this.unclosed.add(closing);
    return end;
  }

  math() {
    for (const [opening, closing] of MATH) {
      if (!this.text.startsWith(opening, this.at)) continue;
      const end = this.until(closing, this.at + 2);
      if (end < 0) continue;
      this.take(end + 2 - this.at, element("span", "math", this.text.slice(this.at, end + 2)));
      return true;
    }
    if (this.text[this.at] !== "$") return false;
    const match = /^\$(?=[^\s$])[^$\n]*[^\s$\\]\$(?!\d)|^\$[^\s$]\$(?!\d)/.exec(
      this.text.slice(this.at, this.at + MAX_MATH));
    if (match) this.take(match[0].length, element("span", "math", match[0]));
    return Boolean(match);
  }

  code() {
    const runs = /`+/g;
    runs.lastIndex = this.at;
    const ticks = runs.exec(this.text)[0];
    if (!this.unclosed.has(ticks)) {
      for (let run = runs.exec(this.text); run; run = runs.exec(this.text)) {
        if (run[0] !== ticks) continue;
        const inside = this.text.slice(this.at + ticks.length, run.index).replaceAll("\n", " ");
        const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim();
        this.take(runs.lastIndex - this.at, element("code", "", padded ? inside.slice(1, -1) : inside));
        return;
      }
      this.unclosed.add(ticks);
    }
    this.take(ticks.length, ticks);
  }

  delimiters(char) {
    let end = this.at;
    while (this.text[end] === char) end += 1;
    const before = this.text[this.at - 1] ?? " ", after = this.text[end] ?? " ";
    const open = (left, right) => right.trim() !== "" && (
      !PUNCTUATION.test(right) || left.trim() === "" || PUNCTUATION.test(left));
    let opens = open(before, after), closes = open(after, before);
    if (char === "_") {
      [opens, closes] = [opens && (!closes || PUNCTUATION.test(before)),
        closes && (!opens || PUNCTUATION.test(after))];
    }
    this.take(end - this.at, { char, length: end - this.at, opens, closes });
  }

  bare(text) {
    let trimmed = text.replace(/[.,:;!?_~]+$/, "");
    if (trimmed.endsWith(")") && !trimmed.includes("(")) trimmed = trimmed.replace(/[).,:;!?]+$/, "");
    const href = address(trimmed);
    if (href) this.take(trimmed.length, link(href, [trimmed]));
    else this.take(1, "h");
  }

  open(length, image) {
    const text = image ? "![" : "[";
    this.take(length, text);
    this.brackets.push({ part: this.parts.length - 1, at: this.at, image });
    if (this.brackets.length > 64) this.brackets.shift();
  }

  // "](address)" makes a link of what stands since the bracket. An image isn't loaded: its text links to it.
  close() {
    const bracket = this.brackets.pop();
    const end = bracket ? destination(this.text, this.at + 1) : null;
    const href = end && address(end.address);
    if (!href) return this.take(1, "]");
    const inside = bracket.image ? [this.text.slice(bracket.at, this.at) || end.address]
      : emphasize(this.parts.splice(bracket.part).slice(1));
    this.parts.length = bracket.part;
    this.take(end.at - this.at, link(href, inside));
    if (!bracket.image) this.brackets = [];  // a link stands in no link
  }
}

// What follows "]": "(address)" or "(address "title")" → the address and where it ends.
function destination(text, start) {
  if (text[start] !== "(") return null;
  const match = DESTINATION.exec(text.slice(start, start + MAX_ADDRESS));
  return match && { address: match[1] ?? match[2], at: start + match[0].length };
}

// Runs of delimiters become emphasis where they open and close; what is left of them is text.
function emphasize(parts) {
  const nodes = [], openers = [], open = { "*": 0, "_": 0, "~": 0 };
  const written = (node) => node.char && !node.nodeType ? node.char.repeat(node.length) : node;
  for (const part of parts) {
    if (typeof part === "string" || part.nodeType) { nodes.push(part); continue; }
    let { length } = part;
    while (part.closes && length && open[part.char]) {
      let opener = openers.pop();
      for (; opener.run.char !== part.char; opener = openers.pop()) open[opener.run.char] -= 1;
      const size = Math.min(2, length, opener.run.length);
      const tag = part.char === "~" ? "del" : size === 2 ? "strong" : "em";
      const inside = nodes.splice(opener.at + 1).map(written);
      nodes.push(element(tag, "", inside));
      length -= size;
      opener.run.length -= size;
      if (opener.run.length) openers.push(opener);
      else open[part.char] -= 1;
    }
    const run = { ...part, length };
    if (length && part.opens && openers.length < MAX_EMPHASIS) {
      openers.push({ run, at: nodes.length });
      open[part.char] += 1;
    }
    if (length) nodes.push(run);
  }
  return joined(nodes.map(written));
}

function joined(nodes) {
  const result = [];
  for (const node of nodes) {
    if (typeof node === "string" && typeof result.at(-1) === "string") result[result.length - 1] += node;
    else result.push(node);
  }
  return result;
}

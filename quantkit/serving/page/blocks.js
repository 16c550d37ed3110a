"use strict";
// Markdown's blocks: lines → headings, lists, tables, … as plain objects. Each has the number of its first
// line, its `source`, which decides what it looks like, and its `parts`, if it has any. Where `shell` is
// another one, the element around the parts is another one, too.

const MAX_DEPTH = 12;  // of lists and quotes; what is deeper is plain text
const MAX_PROSE = 4000;  // characters of text that is parsed at once: emphasis doesn't reach further
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/, RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/, QUOTE = /^ {0,3}> ?/, ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: |$)/;

const indent = (line) => line.length - line.trimStart().length;
const blank = (line) => !line.trim();

function parseBlocks(lines, depth = 0) {
  const blocks = [];
  if (depth > MAX_DEPTH) return [{ type: "text", line: 0, source: lines.join("\n") }];
  for (let at = 0; at < lines.length;) {
    if (blank(lines[at])) { at += 1; continue; }
    const [block, next] = nextBlock(lines, at, depth);
    // a fence at the end of a text has nothing to show yet
    if (!block.open || !blank(block.code)) {
      blocks.push({ source: lines.slice(at, next).join("\n"), ...block, line: at });
    }
    at = next;
  }
  return blocks;
}

// Text of a paragraph, heading or cell. Long text has parts, so that what follows leaves them as they are.
function prose(text) {
  if (text.length <= MAX_PROSE) return { source: text };
  const parts = [];
  for (let at = 0; at < text.length; at += parts.at(-1).source.length) {
    let source = text.slice(at, at + MAX_PROSE);
    if (at + MAX_PROSE < text.length) {
      const end = source.lastIndexOf("\n") + 1 || source.lastIndexOf(" ") + 1
        || MAX_PROSE - /[\ud800-\udbff]$/.test(source);
      source = source.slice(0, end);
    }
    parts.push({ type: "span", source });
  }
  return { source: text, parts };
}

function nextBlock(lines, at, depth) {
  const line = lines[at];
  if (fenceOf(line)) return codeBlock(lines, at);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = line.slice(heading[0].length).trim().replace(/(^|[ \t])#+$/, "").trim();
    return [{ type: "heading", shell: heading[1].length, ...prose(text) }, at + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (QUOTE.test(line)) return quoteBlock(lines, at, depth);
  if (itemOf(line)) return listBlock(lines, at, depth);
  if (isTable(lines, at)) return tableBlock(lines, at);
  return mathBlock(lines, at) ?? paragraph(lines, at);
}

function fenceOf(line) {
  const match = FENCE.exec(line) ?? /^ {0,3}(~{3,})(.*)$/.exec(line);
  return match && { mark: match[1], info: match[2].trim(), indent: indent(line) };
}

function codeBlock(lines, start) {
  const fence = fenceOf(lines[start]), code = [];
  let at = start + 1, open = true;
  for (; at < lines.length && open; at++) {
    const text = lines[at].trim();
    if (text.length >= fence.mark.length && text === fence.mark[0].repeat(text.length)) open = false;
    else code.push(lines[at].slice(Math.min(fence.indent, indent(lines[at]))));
  }
  return [{ type: "code", shell: fence.info.split(/\s/)[0], code: code.join("\n"), open }, at];
}

function quoteBlock(lines, at, depth) {
  const inside = [];
  for (; at < lines.length && !blank(lines[at]); at++) {
    if (!QUOTE.test(lines[at]) && begins(lines, at)) break;
    inside.push(lines[at].replace(QUOTE, ""));
  }
  return [{ type: "quote", parts: parseBlocks(inside, depth + 1) }, at];
}

function itemOf(line) {
  const match = ITEM.exec(line);
  if (!match || RULE.test(line)) return null;
  const ordered = match[2].length > 1, text = line.slice(match[0].length);
  const space = blank(text) || indent(text) > 3 ? 0 : indent(text);
  return { indent: match[1].length, ordered, kind: match[2].at(-1), number: parseInt(match[2], 10),
    offset: match[0].length + space, text: text.slice(space) };
}

// Deeper lines belong to an item from two columns on: models count nested lists' columns as they like.
function listBlock(lines, start, depth) {
  const first = itemOf(lines[start]), parts = [];
  let at = start, loose = false;
  while (at < lines.length) {
    const item = itemOf(lines[at]);
    if (!item || item.kind !== first.kind || item.indent >= first.indent + 2) break;
    const inside = [item.text.replace(/^\[ \] /, "☐ ").replace(/^\[[xX]\] /, "☑ ")];
    let empty = false;
    for (at += 1; at < lines.length; at++) {
      const line = lines[at];
      if (blank(line)) { empty = true; inside.push(""); continue; }
      const inner = indent(line) >= Math.min(item.offset, first.indent + 2);
      if (!inner && (empty || itemOf(line) || begins(lines, at))) break;
      if (inner && empty && inside.some((text) => text)) loose ||= !itemOf(line);
      empty = false;
      inside.push(inner ? line.slice(Math.min(indent(line), item.offset)) : line.trimStart());
    }
    parts.push({ type: "item", source: inside.join("\n"), parts: parseBlocks(inside, depth + 1) });
    if (at < lines.length && empty && itemOf(lines[at])?.kind === first.kind) loose = true;
  }
  return [{ type: "list", shell: first.ordered ? first.number : null, loose, parts }, at];
}

function cells(line) {
  const text = line.trim().replace(/^\|/, ""), parts = [""];
  for (let at = 0; at < text.length; at++) {
    if (text[at] === "\\" && text[at + 1] === "|") { parts[parts.length - 1] += "|"; at += 1; }
    else if (text[at] === "|") parts.push("");
    else parts[parts.length - 1] += text[at];
  }
  if (parts.length > 1 && blank(parts.at(-1))) parts.pop();
  return parts.map((part) => part.trim());
}

function isTable(lines, at) {
  const rule = lines[at + 1];
  return rule !== undefined && lines[at].includes("|") && rule.includes("-") && /^[\s|:-]+$/.test(rule)
    && cells(rule).every((cell) => /^:?-+:?$/.test(cell)) && cells(rule).length === cells(lines[at]).length;
}

function tableBlock(lines, start) {
  const sides = cells(lines[start + 1]).map((cell) => {
    if (!cell.endsWith(":")) return "";
    return cell.startsWith(":") ? "center" : "right";
  });
  const row = (line, tag) => ({ type: "row", source: line, parts: cells(line).slice(0, sides.length).map(
    (text, column) => ({ type: "cell", tag, side: sides[column], ...prose(text) })) });
  const parts = [];
  let at = start + 2;
  for (; at < lines.length && !blank(lines[at]) && !begins(lines, at); at++) parts.push(row(lines[at], "td"));
  return [{ type: "table", shell: lines[start] + "\n" + sides, head: row(lines[start], "th"), parts }, at];
}

// A formula on lines of its own stays as it was written. Like a code block it may lack its end.
function mathBlock(lines, start) {
  const first = lines[start].trim(), opening = first.slice(0, 2);
  if (opening !== "$$" && opening !== "\\[") return null;
  const closing = opening === "$$" ? "$$" : "\\]", alone = first.length === 2;
  if (!alone && !(first.length >= 4 && first.endsWith(closing))) return null;
  let at = start + 1;
  if (alone) while (at < lines.length && !lines[at++].trimEnd().endsWith(closing));
  return [{ type: "text" }, at];
}

function paragraph(lines, start) {
  const text = [lines[start].trim()];
  let at = start + 1;
  for (; at < lines.length && !blank(lines[at]); at++) {
    if (/^ {0,3}=+[ \t]*$/.test(lines[at])) {
      return [{ type: "heading", shell: 1, ...prose(text.join("\n")) }, at + 1];
    }
    if (begins(lines, at)) break;
    text.push(lines[at].trim());
  }
  return [{ type: "paragraph", ...prose(text.join("\n")) }, at];
}

// Whether a line begins another block although no blank line is before it.
function begins(lines, at) {
  const line = lines[at], item = itemOf(line);
  return Boolean(fenceOf(line)) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)
    || Boolean(item && (!item.ordered || item.number === 1)) || isTable(lines, at)
    || mathBlock(lines, at) !== null;
}

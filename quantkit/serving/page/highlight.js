"use strict";
// Colours comments, strings, numbers and keywords of common languages; it knows no grammar and claims none.

const LANGUAGES = (() => {
  const slashes = String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`, hash = String.raw`#[^\n]*`;
  const quotes = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`, ticks = "|`(?:\\\\.|[^`\\\\])*`?";
  const triple = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|`, dashes = String.raw`--[^\n]*`;
  const c = "auto break case char class const continue default do double else enum extern final float "
    + "for goto if int long namespace new nullptr private protected public return short signed "
    + "sizeof static struct switch template this throw try typedef typename union unsigned using "
    + "virtual void volatile while bool true false null import package interface extends "
    + "implements override string var abstract async await fun val func type map range chan defer "
    + "go select let mut fn impl trait pub use mod match where self super as in ref dyn move "
    + "crate loop";
  const script = "async await break case catch class const continue debugger default delete do else export "
    + "extends false finally for from function if import in instanceof interface let new null of "
    + "return static super switch this throw true try type typeof undefined var void while yield";
  const python = "and as assert async await break case class continue def del elif else except False finally "
    + "for from global if import in is lambda match None nonlocal not or pass raise return self "
    + "True try while with yield";
  const shell = "case do done elif else esac export fi for function if in local return set then until while "
    + "cd echo sudo";
  const sql = "add all alter and as asc between by case create cross delete desc distinct drop else end "
    + "exists from full group having in inner insert into is join key left like limit not null "
    + "offset on or order outer primary right select set table then union update values when "
    + "where with";
  const ruby = "begin class def do else elsif end ensure false for if in module nil not or rescue return "
    + "self then true unless until when while yield";
  const language = (comments, strings, keywords, flags = "") => new RegExp(
    `(?<comment>${comments})|(?<string>${strings})|(?<number>\\b\\d[\\d_.]*(?:e[+-]?\\d+)?\\w*)`
    + `|\\b(?<keyword>${keywords.replaceAll(" ", "|")})\\b`, "g" + flags);
  const families = [
    ["c cpp c++ h hpp java kotlin go rust rs cs csharp swift scala php",
      language(slashes, quotes + ticks, c)],
    ["js javascript jsx ts typescript tsx", language(slashes, quotes + ticks, script)],
    ["json", language(slashes, quotes, "true false null")],
    ["py python", language(hash, triple + quotes, python)],
    ["sh bash shell zsh console", language(String.raw`(?<!\S)` + hash, quotes, shell)],
    ["yaml yml toml ini", language(String.raw`(?<!\S)` + hash, quotes, "true false null")],
    ["rb ruby", language(hash, quotes, ruby)],
    ["sql", language(dashes, quotes, sql, "i")],
  ];
  return new Map(families.flatMap(([names, rule]) => names.split(" ").map((name) => [name, rule])));
})();
const HIGHLIGHTED = 50000;  // characters: longer code stays plain

// Nodes of a code's text. Those of a language that isn't known are one text.
function highlight(code, language) {
  const rule = LANGUAGES.get(language.toLowerCase());
  if (!rule || code.length > HIGHLIGHTED) return [code];
  const nodes = [];
  let end = 0;
  for (const match of code.matchAll(rule)) {
    const kind = ["comment", "string", "number", "keyword"].find((name) => match.groups[name] !== undefined);
    nodes.push(code.slice(end, match.index), element("span", "code-" + kind, match[0]));
    end = match.index + match[0].length;
  }
  nodes.push(code.slice(end));
  return nodes;
}

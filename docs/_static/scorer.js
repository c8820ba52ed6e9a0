// Search: guides and rules come before tables of figures and the changelog, which contain every word.
const searchLast = ["benchmarks", "changelog", "design"];

var Scorer = {
  score: ([docname, title, anchor, descr, score, filename]) => (searchLast.includes(docname) ? score / 4 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

"""Contrast of a page in a browser, as computed from its styles."""

FAINT_TEXT = """() => {
  const parse = colour => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
  const light = rgb => rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest("script, style, title")) continue;
    const style = getComputedStyle(element), chain = [];
    for (let at = element; at; at = at.parentElement) chain.unshift(getComputedStyle(at));
    const paper = chain.reduce((below, each) => over(parse(each.backgroundColor), below), [255, 255, 255]);
    const ink = parse(element.closest("svg") ? style.fill : style.color);
    ink[3] *= chain.reduce((product, each) => product * each.opacity, 1);
    const [high, low] = [light(over(ink, paper)), light(paper)].sort((a, b) => b - a), ratio = (high + 0.05) / (low + 0.05);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) found.push(`${walker.currentNode.data.trim()}: ${ratio.toFixed(2)}`);
  }
  return found;
}"""
"""A function for the browser: the visible texts that stand out too little (WCAG 2.2, 1.4.3) from
the nearest backgrounds behind them, with their contrast. Opacity counts; large text needs 3, other
text 4.5."""

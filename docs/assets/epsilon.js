// The slider on the page about epsilon: bounds by their formulas, nothing is loaded or sent.
(function () {
  function percent(p) {
    return (p > 0.999 ? (100 * p).toFixed(3) : (100 * p).toFixed(1)) + " %";
  }
  function start() {
    var box = document.getElementById("epsilon-slider");
    if (!box) return;
    var slider = box.querySelector("input");
    var shown = box.querySelector("output");
    var answer = box.querySelector(".answer");
    function update() {
      var epsilon = Math.pow(10, Number(slider.value));
      var delta = 1e-5;
      var factor = Math.exp(epsilon);
      var right = Math.min(1, (factor + delta) / (factor + 1));
      var after = (factor * 0.01) / (factor * 0.01 + 0.99);
      shown.textContent = epsilon.toPrecision(2);
      answer.textContent =
        "Nothing becomes more than " + factor.toPrecision(3) + " times as likely through one record. " +
        "Somebody who guesses between the two worlds from even odds is right at most " + percent(right) +
        " of the time; a suspicion of one in a hundred grows to " + percent(after) + " at most.";
    }
    slider.addEventListener("input", update);
    update();
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();

# Pools the slopes of 20 draws by Rubin's rules, as rubin.py of docs/draws.md does. Typed in the checkout, with
# drawn.csv of `histocc predict … --draws 20` there:
#
#     Rscript examples/rubin.R
#
# Prints the slope of the HISCAM score over `year`, and its standard error. Of several codes it takes the first.

rows <- read.csv("drawn.csv", colClasses = "character")
classes <- read.csv("histocc/hisco_classes.csv", colClasses = "character")
hiscam <- setNames(as.numeric(classes$hiscam_u1), classes$hisco)
scores <- lapply(1:20, function(i) unname(hiscam[sub("&.*", "", rows[[paste0("draw_", i)]])]))
fits <- lapply(scores, function(score) lm(score ~ as.numeric(rows$year)))
q <- sapply(fits, function(fit) coef(fit)[[2]])
u <- sapply(fits, function(fit) vcov(fit)[2, 2])
error <- sqrt(mean(u) + (1 + 1 / length(q)) * var(q))
told <- var(as.numeric(rows$expected_hiscam), na.rm = TRUE) / mean(sapply(scores, var, na.rm = TRUE)) # λ
cat(mean(q) / told, error / told, "\n")

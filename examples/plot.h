/* Line charts as SVG: a few series of points, axes with round numbers, a legend. Include it after
   common.h. Not part of the library. */
#ifndef EXAMPLES_PLOT_H
#define EXAMPLES_PLOT_H

#include <math.h>

typedef struct plot_line { /* one series, growing by plot_add */
  const char *name, *colour;
  double *x, *y;
  size_t count, room;
  bool dots; /* marks every point */
} plot_line;

typedef struct plot {
  const char *title, *x_name, *y_name;
  const plot_line *lines;
  int line_count;
  bool log_x;
} plot;

typedef struct plot_axis { double low, high, step; } plot_axis;

enum { PLOT_WIDTH = 760, PLOT_HEIGHT = 420, PLOT_LEFT = 70, PLOT_RIGHT = 20, PLOT_TOP = 50,
       PLOT_BOTTOM = 50, PLOT_COLUMNS = 600 };

/* Points that are not finite are passed over. */
static inline bool plot_add(plot_line *line, double x, double y) {
  if (!isfinite(x) || !isfinite(y)) return true;
  if (line->count == line->room) {
    size_t room = 2 * line->room + 256;
    double *grown_x = (double *)realloc(line->x, room * sizeof *grown_x), *grown_y;
    if (!grown_x) return false;
    line->x = grown_x;
    grown_y = (double *)realloc(line->y, room * sizeof *grown_y);
    if (!grown_y) return false;
    line->y = grown_y;
    line->room = room;
  }
  line->x[line->count] = x;
  line->y[line->count++] = y;
  return true;
}

static inline void plot_free(plot_line *line) {
  free(line->x);
  free(line->y);
}

/* About five steps of 1, 2 or 5 times a power of ten that cover low .. high. */
static inline plot_axis plot_round(double low, double high) {
  plot_axis a;
  double unit;
  if (!(high > low)) high = low + 1;
  a.step = (high - low) / 5;
  unit = pow(10, floor(log10(a.step)));
  a.step = unit * (a.step > 5 * unit ? 10 : a.step > 2 * unit ? 5 : a.step > unit ? 2 : 1);
  a.low = floor(low / a.step) * a.step;
  a.high = ceil(high / a.step) * a.step;
  return a;
}

static inline double plot_x(const plot *p, const plot_line *line, size_t i) {
  return p->log_x ? log10(line->x[i]) : line->x[i];
}

/* The axis that all points fit; which 0: x, 1: y. */
static inline plot_axis plot_axis_of(const plot *p, int which) {
  double low = INFINITY, high = -INFINITY;
  plot_axis a;
  size_t i;
  int k;
  for (k = 0; k < p->line_count; k++)
    for (i = 0; i < p->lines[k].count; i++) {
      double v = which ? p->lines[k].y[i] : plot_x(p, &p->lines[k], i);
      low = fmin(low, v);
      high = fmax(high, v);
    }
  if (!(low <= high)) low = 0, high = 1;
  a = plot_round(low, high);
  if (!which && p->log_x) a.low = floor(low), a.high = ceil(high), a.step = 1;
  return a;
}

static inline double plot_across(const plot_axis *x, double v) {
  double share = (v - x->low) / (x->high - x->low);
  return PLOT_LEFT + share * (PLOT_WIDTH - PLOT_LEFT - PLOT_RIGHT);
}

static inline double plot_down(const plot_axis *y, double v) {
  double share = (v - y->low) / (y->high - y->low);
  return PLOT_HEIGHT - PLOT_BOTTOM - share * (PLOT_HEIGHT - PLOT_TOP - PLOT_BOTTOM);
}

static inline void plot_text(FILE *f, double x, double y, const char *anchor, const char *text) {
  fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor, text);
}

static inline void plot_grid(FILE *f, const plot *p, const plot_axis *x, const plot_axis *y) {
  char label[40];
  int i, n = (int)lround((y->high - y->low) / y->step);
  for (i = 0; i <= n; i++) {
    double v = y->low + i * y->step, at = plot_down(y, v);
    fprintf(f, "<path d=\"M%d %.1fH%d\" stroke=\"#ddd\"/>\n", PLOT_LEFT, at,
            PLOT_WIDTH - PLOT_RIGHT);
    snprintf(label, sizeof label, "%.6g", fabs(v) < y->step / 1e6 ? 0 : v);
    plot_text(f, PLOT_LEFT - 8, at + 4, "end", label);
  }
  n = (int)lround((x->high - x->low) / x->step);
  for (i = 0; i <= n; i++) {
    double v = x->low + i * x->step, at = plot_across(x, v);
    fprintf(f, "<path d=\"M%.1f %dv5\" stroke=\"#888\"/>\n", at, PLOT_HEIGHT - PLOT_BOTTOM);
    snprintf(label, sizeof label, "%.6g", p->log_x ? pow(10, v) : v);
    plot_text(f, at, PLOT_HEIGHT - PLOT_BOTTOM + 20, "middle", label);
  }
  fprintf(f, "<path d=\"M%d %dV%dH%d\" stroke=\"#888\"/>\n", PLOT_LEFT, PLOT_TOP,
          PLOT_HEIGHT - PLOT_BOTTOM, PLOT_WIDTH - PLOT_RIGHT);
}

/* Long series are averaged over what falls into one column of the picture. */
static inline void plot_series(FILE *f, const plot *p, const plot_line *line, const plot_axis *x,
                               const plot_axis *y) {
  size_t per = (line->count + PLOT_COLUMNS - 1) / PLOT_COLUMNS, i, j;
  fprintf(f, "<path stroke=\"%s\" stroke-width=\"1.5\" stroke-linejoin=\"round\" d=\"",
          line->colour);
  for (i = 0; i < line->count; i += per) {
    double across = 0, down = 0, n = 0;
    for (j = i; j < line->count && j < i + per; j++, n++)
      across += plot_x(p, line, j), down += line->y[j];
    fprintf(f, "%s%.1f %.1f", i ? "L" : "M", plot_across(x, across / n), plot_down(y, down / n));
  }
  fprintf(f, "\"/>\n");
  for (i = 0; line->dots && i < line->count; i++)
    fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.5\" fill=\"%s\"/>\n",
            plot_across(x, plot_x(p, line, i)), plot_down(y, line->y[i]), line->colour);
}

/* Draws into a file that is there whole or as it was. */
static inline bool plot_write(const plot *p, const char *path) {
  plot_axis x = plot_axis_of(p, 0), y = plot_axis_of(p, 1);
  char part[1100];
  bool good;
  FILE *f;
  int k;
  snprintf(part, sizeof part, "%s.part", path);
  f = fopen(part, "w");
  if (!f) return false;
  fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" fill=\"none\" "
          "font-family=\"sans-serif\" font-size=\"12\">\n<style>text{fill:#333}</style>\n"
          "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n", PLOT_WIDTH, PLOT_HEIGHT);
  plot_grid(f, p, &x, &y);
  plot_text(f, PLOT_LEFT, 20, "start", p->title);
  plot_text(f, PLOT_WIDTH / 2.0, PLOT_HEIGHT - 10, "middle", p->x_name);
  plot_text(f, PLOT_LEFT, PLOT_TOP - 10, "end", p->y_name);
  for (k = 0; k < p->line_count; k++) {
    const plot_line *line = &p->lines[k];
    double at = PLOT_WIDTH - PLOT_RIGHT - 130.0 * (p->line_count - k);
    if (line->count) plot_series(f, p, line, &x, &y);
    fprintf(f, "<path d=\"M%.1f 16h20\" stroke=\"%s\" stroke-width=\"2\"/>\n", at, line->colour);
    plot_text(f, at + 26, 20, "start", line->name);
  }
  fprintf(f, "</svg>\n");
  good = !ferror(f);
  if (fclose(f) != 0 || !good || rename(part, path) != 0) good = false;
  if (!good) remove(part);
  return good;
}

#endif

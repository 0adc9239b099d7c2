// SPDX-License-Identifier: Apache-2.0

package web

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"time"
	"unicode/utf8"
)

// What the page shows of the log.
const (
	logLines = 100
	maxLine  = 1 << 10 // bytes
)

// A Line is one of the daemon's log.
type Line struct {
	Time    time.Time `json:"time"`
	Level   string    `json:"level"`
	Message string    `json:"message"`
	More    string    `json:"more,omitempty"` // key=value, as in the log
}

// A Tail keeps the last lines of a log.
type Tail struct {
	mu    sync.Mutex
	buf   bytes.Buffer
	lines []Line // oldest first
}

// Keep returns a logger that writes to where another one does, and to the tail.
func (t *Tail) Keep(l *slog.Logger) *slog.Logger {
	return slog.New(&tee{Handler: l.Handler(), tail: t, text: slog.NewTextHandler(&t.buf, &slog.HandlerOptions{
		// These have fields of their own.
		ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
			if len(groups) == 0 && (a.Key == slog.TimeKey || a.Key == slog.LevelKey || a.Key == slog.MessageKey) {
				return slog.Attr{}
			}
			return a
		},
	})})
}

// all returns the lines, oldest first.
func (t *Tail) all() []Line {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]Line{}, t.lines...)
}

// A tee handles records twice.
type tee struct {
	slog.Handler
	tail *Tail
	text slog.Handler // into the tail's buffer
}

func (h *tee) Handle(ctx context.Context, r slog.Record) error {
	h.tail.mu.Lock()
	h.tail.buf.Reset()
	_ = h.text.Handle(ctx, r) // into memory
	if len(h.tail.lines) == logLines {
		h.tail.lines = append(h.tail.lines[:0], h.tail.lines[1:]...)
	}
	h.tail.lines = append(h.tail.lines, Line{
		Time: r.Time, Level: r.Level.String(), Message: cut(r.Message), More: cut(string(bytes.TrimSpace(h.tail.buf.Bytes()))),
	})
	h.tail.mu.Unlock()
	return h.Handler.Handle(ctx, r)
}

func (h *tee) WithAttrs(a []slog.Attr) slog.Handler {
	return &tee{Handler: h.Handler.WithAttrs(a), tail: h.tail, text: h.text.WithAttrs(a)}
}

func (h *tee) WithGroup(name string) slog.Handler {
	return &tee{Handler: h.Handler.WithGroup(name), tail: h.tail, text: h.text.WithGroup(name)}
}

// cut shortens a long text, between runes.
func cut(s string) string {
	if len(s) <= maxLine {
		return s
	}
	n := maxLine
	for n > maxLine-utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "..."
}

// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/xspin/xspin/control"
)

// flushTime is how long a line may wait for others to go with.
const flushTime = 50 * time.Millisecond

func (s *server) logLines(w http.ResponseWriter, r *http.Request) (any, error) {
	name := r.PathValue("name")
	if err := s.d.mayRead(peerOf(r), name); err != nil {
		return nil, err
	}
	q, err := query(r, "hpu", "follow")
	if err != nil {
		return nil, err
	}
	hpu, err1 := hpuOf(q)
	follow, err2 := boolean(q, "follow")
	if err := errors.Join(err1, err2, body(w, r, nil)); err != nil {
		return nil, err
	}
	return s.stream(w, r, "application/jsonl", func(ctx context.Context, w io.Writer) error {
		enc := json.NewEncoder(w)
		enc.SetEscapeHTML(false)
		return s.d.log(ctx, name, hpu, follow, func(l control.LogLine) error { return enc.Encode(l) })
	})
}

func (s *server) capture(w http.ResponseWriter, r *http.Request) (any, error) {
	name := r.PathValue("name")
	if err := s.d.mayRead(peerOf(r), name); err != nil {
		return nil, err
	}
	q, err := query(r, "filter", "verdict", "hpu", "snap", "count")
	if err != nil {
		return nil, err
	}
	hpu, err1 := hpuOf(q)
	snap, err2 := number(q, "snap", 0, 0)
	count, err3 := number(q, "count", 0, 0)
	if err := errors.Join(err1, err2, err3, body(w, r, nil)); err != nil {
		return nil, err
	}
	o := control.CaptureOptions{
		Filter: q.Get("filter"), Verdict: q.Get("verdict"),
		HPU: hpu, Snap: int(snap), Count: int(count),
	}
	return s.stream(w, r, "application/vnd.tcpdump.pcapng", func(ctx context.Context, w io.Writer) error {
		return s.d.capture(ctx, peerOf(r).UID, name, o, w)
	})
}

// stream answers with what f writes, until f returns, the peer goes or the server
// closes. A peer that reads slowly holds its connection and nothing else. An error of the
// first moment is answered as one, a later one cuts the answer short.
func (s *server) stream(w http.ResponseWriter, r *http.Request, kind string, f func(context.Context, io.Writer) error) (any, error) {
	ctl := http.NewResponseController(w)
	_ = ctl.SetReadDeadline(time.Time{}) // a silent peer is no reason to end
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(s.ctx, func() {
		cancel()
		_ = ctl.SetWriteDeadline(time.Now().Add(goodbye)) // of f, if the peer does not read
	})()
	w.Header().Set("Content-Type", kind)
	b := &batcher{w: w, ctl: ctl, ctx: ctx}
	b.mu.Lock()
	b.timer = time.AfterFunc(flushTime, b.flush) // the header, if there is nothing to say
	b.mu.Unlock()
	err := f(ctx, b)
	began := b.close()
	switch {
	case err == nil, errors.Is(err, context.Canceled) && ctx.Err() != nil:
		return nil, nil
	case began:
		panic(http.ErrAbortHandler)
	}
	return nil, err
}

// A batcher flushes what is written a moment later, with what came meanwhile.
type batcher struct {
	w   io.Writer
	ctl *http.ResponseController
	ctx context.Context // ended: somebody else sets deadlines

	mu     sync.Mutex
	timer  *time.Timer // nil: nothing waits
	began  bool
	closed bool
}

func (b *batcher) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.began = true
	if b.timer == nil {
		b.timer = time.AfterFunc(flushTime, b.flush)
	}
	b.extend()
	return b.w.Write(p)
}

// extend gives the peer time to read what comes now.
func (b *batcher) extend() {
	if b.ctx.Err() == nil {
		_ = b.ctl.SetWriteDeadline(time.Now().Add(idle))
	}
}

func (b *batcher) flush() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.timer = nil
	if !b.closed {
		b.began = true
		b.extend()
		_ = b.ctl.Flush() // a peer that has gone ends the next Write
	}
}

// close returns whether the peer has an answer. Nothing may be written from now on.
func (b *batcher) close() (began bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	if b.timer != nil {
		b.timer.Stop()
	}
	return b.began
}

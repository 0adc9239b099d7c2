// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// place reads where in HPU memory: hpu is -1 for the context's memory.
func place(q url.Values) (hpu int, offset, length int64, err error) {
	hpu, err1 := hpuOf(q)
	offset, err2 := number(q, "offset", 0, 0)
	length, err3 := number(q, "length", 0, 0)
	return hpu, offset, length, errors.Join(err1, err2, err3)
}

// readMemory copies in pieces, so that a slow peer does not hold the context.
func (s *server) readMemory(w http.ResponseWriter, r *http.Request) (any, error) {
	name := r.PathValue("name")
	if err := s.d.mayRead(peerOf(r), name); err != nil {
		return nil, err
	}
	q, err := query(r, "hpu", "offset", "length")
	if err != nil {
		return nil, err
	}
	hpu, offset, length, err := place(q)
	if err != nil {
		return nil, err
	}
	err = s.d.withMemory(name, hpu, func(b []byte) error {
		size := int64(len(b))
		if offset > size || length > size-offset {
			return invalid("%d bytes at %d: %s has %d bytes of this memory", length, offset, name, size)
		}
		if length == 0 {
			length = size - offset
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(length, 10))
	if r.Method == http.MethodHead {
		w.WriteHeader(http.StatusOK)
		return nil, nil
	}
	ctl := http.NewResponseController(w)
	chunk := make([]byte, min(length, memoryChunk))
	for length > 0 {
		chunk = chunk[:min(length, memoryChunk)]
		err := s.d.withMemory(name, hpu, func(b []byte) error {
			if int64(len(b)) < offset+int64(len(chunk)) {
				return errOther
			}
			copy(chunk, b[offset:])
			return nil
		})
		if err == nil {
			_ = ctl.SetWriteDeadline(time.Now().Add(stall))
			_, err = w.Write(chunk)
		}
		if err != nil {
			panic(http.ErrAbortHandler) // the peer sees that something is missing
		}
		offset, length = offset+int64(len(chunk)), length-int64(len(chunk))
	}
	return nil, nil
}

// writeMemory writes nothing unless all of it fits. What is longer than a chunk, and
// does not say how long it is, is collected first.
func (s *server) writeMemory(w http.ResponseWriter, r *http.Request) (any, error) {
	if err := s.d.mayAdmin(peerOf(r)); err != nil {
		return nil, err
	}
	name := r.PathValue("name")
	q, err := query(r, "hpu", "offset", "length")
	if err != nil {
		return nil, err
	}
	hpu, offset, length, err := place(q)
	if err != nil {
		return nil, err
	}
	var room int64
	if err := s.d.withMemory(name, hpu, func(b []byte) error {
		if room = int64(len(b)) - offset; room < 0 {
			return invalid("offset %d: %s has %d bytes of this memory", offset, name, len(b))
		}
		return nil
	}); err != nil {
		return nil, err
	}
	switch {
	case length != 0 && r.ContentLength >= 0 && length != r.ContentLength:
		return nil, invalid("length=%d, and %d bytes come", length, r.ContentLength)
	case max(length, r.ContentLength) > room:
		return nil, invalid("%d bytes at %d: %s has room for %d there; nothing was written", max(length, r.ContentLength), offset, name, room)
	}
	ctl := http.NewResponseController(w)
	var src io.Reader = patient{r.Body, ctl}
	if r.ContentLength < 0 {
		var all bytes.Buffer
		n, err := io.Copy(&all, io.LimitReader(src, room+1))
		switch {
		case err != nil:
			return nil, fmt.Errorf("memory of %s: %w; nothing was written", name, err)
		case n > room:
			return nil, invalid("more than %d bytes at %d: %s has no room for more there; nothing was written", room, offset, name)
		case length != 0 && n != length:
			return nil, invalid("length=%d, and %d bytes came; nothing was written", length, n)
		}
		src = &all
	}
	done, err := io.Copy(writer(func(p []byte) error {
		defer func() { offset += int64(len(p)) }()
		return s.d.withMemory(name, hpu, func(b []byte) error {
			if int64(len(b)) < offset+int64(len(p)) {
				return errOther
			}
			copy(b[offset:], p)
			return nil
		})
	}), src)
	if err != nil {
		return nil, fmt.Errorf("memory of %s, after %d bytes: %w", name, done, err)
	}
	return struct {
		Written int64 `json:"written"`
	}{done}, nil
}

// errOther ends a copy whose context has gone, and come again with less memory.
var errOther = errors.New("another context has taken the name")

// A writer is an io.Writer.
type writer func([]byte) error

func (w writer) Write(p []byte) (int, error) {
	if err := w(p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// patient reads a body from a peer that makes progress.
type patient struct {
	io.Reader
	ctl *http.ResponseController
}

func (p patient) Read(b []byte) (int, error) {
	_ = p.ctl.SetReadDeadline(time.Now().Add(stall))
	return p.Reader.Read(b)
}

// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/xspin/xspin/control"
)

// Sizes and times of log files; variables for tests.
var (
	maxLogFile = int64(16 << 20) // then it becomes NAME.log.1, instead of the one before
	logRetry   = 5 * time.Second // after an error
)

// logWrite is how much is written at once.
const logWrite = 64 << 10

// A logFile is where one goroutine writes what comes into a book. When it cannot, it
// says so once, and tries again from the same line: what the book does not have any
// more by then is lost, and the next line says how many.
type logFile struct {
	path string
	r    *logReader
	log  *slog.Logger
	done chan struct{} // closed when the last line is written

	f       *os.File // nil: to be opened
	size    int64
	failing bool
	buf     []byte
}

func newLogFile(b *logBook, dir, name string, logger *slog.Logger) *logFile {
	f := &logFile{
		path: filepath.Join(dir, url.PathEscape(name)+".log"), r: b.reader(-1),
		log: logger, done: make(chan struct{}),
	}
	for i := range f.r.next {
		f.r.next[i] = 1 // the file gets all lines
	}
	if err := f.open(); err != nil {
		f.complain(err)
	}
	go f.run()
	return f
}

func (f *logFile) run() {
	defer close(f.done)
	for {
		last := f.r.gone()
		lines := f.r.lines() // a part
		n, err := f.write(lines)
		switch {
		case err != nil:
			f.r.again(n)
			f.complain(err)
		case f.failing && len(lines) > 0:
			f.failing = false
			f.log.Info("the log file can be written again", "file", f.path)
		}
		switch {
		case err == nil && len(lines) > 0:
		case last:
			if err != nil {
				f.log.Error("log lines were not written", "file", f.path, "lines", len(lines)-n)
			}
			f.close()
			return
		case err != nil:
			_ = f.r.sleep(context.Background(), logRetry)
		default:
			_ = f.r.wait(context.Background())
		}
	}
}

// complain tells of the first error.
func (f *logFile) complain(err error) {
	f.close() // whatever is wrong with it: start over
	if !f.failing {
		f.failing = true
		f.log.Error("the log file cannot be written: lines are kept in memory, the oldest are lost", "file", f.path, "error", err, "retry", logRetry)
	}
}

func (f *logFile) close() {
	if f.f != nil {
		_ = f.f.Close()
		f.f = nil
	}
}

// open opens the file, a directory for it included.
func (f *logFile) open() error {
	if err := os.MkdirAll(filepath.Dir(f.path), 0o750); err != nil {
		return err
	}
	file, err := os.OpenFile(f.path, os.O_WRONLY|os.O_CREATE|os.O_APPEND|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o640)
	if err != nil {
		return err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", f.path)
	}
	if err != nil {
		file.Close()
		return err
	}
	f.f, f.size = file, info.Size()
	return nil
}

// write writes lines, and returns how many before an error.
func (f *logFile) write(lines []control.LogLine) (n int, err error) {
	for n < len(lines) {
		f.buf = f.buf[:0]
		next := n
		for ; next < len(lines) && len(f.buf) < logWrite; next++ {
			f.buf = appendLogLine(f.buf, &lines[next])
		}
		if err := f.append(f.buf); err != nil {
			return n, err
		}
		n = next
	}
	return n, nil
}

// append writes b: all of it, or nothing.
func (f *logFile) append(b []byte) error {
	if f.f == nil {
		if err := f.open(); err != nil {
			return err
		}
	}
	if f.size > 0 && f.size+int64(len(b)) > maxLogFile {
		f.close()
		if err := os.Rename(f.path, f.path+".1"); err != nil {
			return err
		}
		if err := f.open(); err != nil {
			return err
		}
	}
	if _, err := f.f.Write(b); err != nil {
		_ = f.f.Truncate(f.size) // no half lines, if that works at least
		return err
	}
	f.size += int64(len(b))
	return nil
}

func appendLogLine(b []byte, l *control.LogLine) []byte {
	if l.Lost > 0 {
		b = fmt.Appendf(b, "%s hpu=%d (%d lost)\n", l.Time.UTC().Format(logTime), l.HPU, l.Lost)
	}
	return fmt.Appendf(b, "%s hpu=%d %s\n", l.Time.UTC().Format(logTime), l.HPU, l.Text)
}

// logTime has all digits, so that columns stay columns.
const logTime = "2006-01-02T15:04:05.000000000Z07:00"

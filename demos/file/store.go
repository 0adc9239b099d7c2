// SPDX-License-Identifier: Apache-2.0

package file

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/spin"
)

const (
	// DefaultMaxSize is the size limit of a file, in bytes.
	DefaultMaxSize = 1 << 30
	// DefaultPrepare is how many bytes of a file are allocated and mapped
	// before a message arrives.
	DefaultPrepare = 64 << 20

	small      = 16 << 10  // a message up to this size stays in memory until its end
	unmapped   = 256 << 10 // a file up to this size is not worth a mapping
	copied     = 1 << 20   // a message up to this size is copied out of a file prepared for a longer one
	step       = 4 << 20   // bytes allocated at a time
	leastAhead = 1 << 20   // see ahead
	mostAhead  = 32 << 20

	backlog = 256 // ended messages waiting for endAll; with more, new ones are refused
)

// StoreConfig says where messages become files.
type StoreConfig struct {
	Dir     string // must exist
	MaxSize int64  // of a file, bytes. 0: DefaultMaxSize
	// Prepare is how much of the next large file is prepared in advance, in bytes:
	// allocated, zeroed and mapped, which costs more than copying does. It is limited
	// to a quarter of the free space. 0: DefaultPrepare; negative: nothing.
	Prepare int64
	// Timeout is how long a sender may be silent before its message is abandoned. 0
	// for the NIC's default.
	Timeout time.Duration
	// Sync delays the end of a message until its file and the directory are on disk
	// (fsync). Without it, files that were received may be lost if the machine crashes.
	Sync bool
	// Ended is called for every message, one after the other, in the order in which
	// they ended. While it does not return, messages that end wait; if too many do,
	// new ones are refused. Required.
	Ended func(Received)
}

// Received is a message that has ended, well or not.
type Received struct {
	Source netip.AddrPort
	Number uint32 // of the message, unique for its sender
	Path   string // of the file, if it was received
	Bytes  uint64
	Took   time.Duration // from the first packet to the rename
	SHA256 string        // hexadecimal, of the file

	Err error // why there is no file
}

// A Store makes files of messages. It is the binder of an execution context: each
// message has a window of its own, on a file that has no name until it is complete.
// So nobody ever sees half a file, and a crash of the process leaves nothing behind;
// with Sync, the same holds for a crash of the machine.
//
// Handlers run on the NIC's threads, with a time limit. They copy into mapped memory
// and give a finished file its name. Goroutines do what takes longer: allocating and
// mapping memory ahead of the data, checksums, unmapping.
type Store struct {
	cfg  StoreConfig
	most int // messages at a time
	dir  *os.File
	grow chan *part
	stop chan struct{}
	quit sync.WaitGroup

	mu       sync.Mutex
	cond     sync.Cond // signalled when ended or closed changes
	live     map[*incoming]struct{}
	ended    []*incoming
	spare    *part // prepared, for the next message that is not small
	prepared bool  // there is a prepared file, here or with a message
	closed   bool
}

// OpenStore checks the directory and prepares the first file.
func OpenStore(cfg StoreConfig) (_ *Store, err error) {
	if cfg.MaxSize == 0 {
		cfg.MaxSize = DefaultMaxSize
	}
	if cfg.Prepare == 0 {
		cfg.Prepare = DefaultPrepare
	}
	if cfg.MaxSize < 0 {
		return nil, fmt.Errorf("files of at most %d bytes", cfg.MaxSize)
	}
	s := &Store{cfg: cfg, most: mostLive(), live: map[*incoming]struct{}{}, grow: make(chan *part, 1024), stop: make(chan struct{})}
	s.cond.L = &s.mu
	if s.dir, err = os.OpenFile(cfg.Dir, os.O_RDONLY|unix.O_DIRECTORY, 0); err != nil {
		return nil, fmt.Errorf("directory for files: %w", err)
	}
	p, err := s.create()
	if err != nil {
		s.dir.Close()
		return nil, err
	}
	p.close()
	s.prepare()
	s.quit.Go(s.growAll)
	s.quit.Go(s.endAll)
	return s, nil
}

// Close waits until Ended has been called for all messages that have ended, and gives
// up the others. Before it, the NIC must be closed, or the context removed.
func (s *Store) Close() error {
	s.mu.Lock()
	s.closed = true
	s.cond.Broadcast()
	s.mu.Unlock()
	close(s.stop)
	s.quit.Wait()
	for in := range s.live {
		in.release()
	}
	if s.spare != nil {
		s.spare.close()
	}
	return s.dir.Close()
}

// create makes a file without a name.
func (s *Store) create() (*part, error) {
	fd, err := unix.Openat(int(s.dir.Fd()), ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o666)
	switch {
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EISDIR):
		return nil, fmt.Errorf("directory %s: its file system has no files without a name (O_TMPFILE): %w: choose one on tmpfs, ext4, xfs or btrfs", s.cfg.Dir, err)
	case err != nil:
		return nil, fmt.Errorf("new file in %s: %w", s.cfg.Dir, err)
	}
	p := &part{f: os.NewFile(uintptr(fd), s.cfg.Dir), limit: s.cfg.MaxSize}
	p.final.Store(-1)
	return p, nil
}

// createLarge makes a sparse file of the largest size. As its size does not change
// while blocks are allocated, finish need not wait for that.
func (s *Store) createLarge() (*part, error) {
	p, err := s.create()
	if err != nil {
		return nil, err
	}
	if err := p.f.Truncate(p.full()); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// take returns a file for a message that is not small.
func (s *Store) take() (*part, error) {
	s.mu.Lock()
	p := s.spare
	s.spare = nil
	s.mu.Unlock()
	if p != nil {
		return p, nil
	}
	return s.createLarge()
}

// prepare prepares a file for the next message that is not small. It may take long. If
// there is no room it prepares none, and the message will get the error.
func (s *Store) prepare() {
	n := min(s.cfg.Prepare, s.cfg.MaxSize)
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(s.dir.Fd()), &fs); err == nil {
		n = min(n, int64(fs.Bavail)/4*fs.Bsize)
	}
	s.mu.Lock()
	idle := s.prepared || s.closed
	s.mu.Unlock()
	if idle || n <= unmapped {
		return
	}
	p, err := s.createLarge()
	if err != nil {
		return
	}
	p.extend(n)
	p.prepared = true
	s.mu.Lock()
	s.spare, s.prepared = p, true
	s.mu.Unlock()
}

// recycle takes back a file that was written into and not kept. If it was prepared
// it is the next message's: a message becomes a file only if it has overwritten all
// that it has of this one.
func (s *Store) recycle(p *part) {
	s.mu.Lock()
	if p.prepared && !s.closed && p.high.Load() <= p.ready.Load() {
		p.high.Store(0)
		s.spare = p
		p = nil
	}
	s.mu.Unlock()
	if p != nil {
		s.discard(p)
	}
}

// discard closes a file.
func (s *Store) discard(p *part) {
	if p.prepared {
		s.mu.Lock()
		s.prepared = false
		s.mu.Unlock()
	}
	p.close()
}

// growAll extends files ahead of what is written to them.
func (s *Store) growAll() {
	for {
		select {
		case p := <-s.grow:
			high := p.high.Load()
			p.extend(high + ahead(high))
		case <-s.stop:
			return
		}
	}
}

// ahead is how far a file should be ready before what is written.
func ahead(high int64) int64 { return min(max(high/2, leastAhead), mostAhead) }

// endAll does the rest for messages that have ended.
func (s *Store) endAll() {
	for {
		s.mu.Lock()
		for len(s.ended) == 0 && !s.closed {
			s.cond.Wait()
		}
		if len(s.ended) == 0 {
			s.mu.Unlock()
			return
		}
		in := s.ended[0]
		s.ended = s.ended[1:]
		delete(s.live, in)
		s.mu.Unlock()

		r := in.Received
		if r.Err == nil {
			r.SHA256, r.Err = in.hash()
		}
		in.release()
		s.prepare() // before Ended is called, which may rely on it
		s.cfg.Ended(r)
	}
}

// Bind implements hpu.Binder.
func (s *Store) Bind(m *hpu.Message) (spin.Binding, error) {
	in, err := s.begin(m.Source(), m.Number())
	if err != nil {
		return spin.Binding{}, err
	}
	return spin.Binding{Window: in, User: in}, nil
}

// Unbind implements hpu.Binder.
func (s *Store) Unbind(m *hpu.Message, r *spin.Result) {
	in := m.Binding().User.(*incoming)
	if r.Cause != spin.Complete {
		missing := fmt.Sprintf("%d of %d bytes are missing", r.Missing, r.Length)
		if _, known := m.Length(); !known {
			missing = fmt.Sprintf("its end is missing, and %d of the %d bytes before", r.Missing, r.Length)
		}
		in.fail(fmt.Errorf("%s: %s", r.Cause, missing))
	}
	s.end(in)
}

// Reasons to refuse a message for now; its sender will try again.
var (
	errBacklog = errors.New("files are being received faster than they are dealt with")
	errFiles   = errors.New("as many files are being received as this process may have open")
)

// perMessage is how many files a message has open at most: the one it is written to, the
// one it becomes, and the one that had its name.
const perMessage = 3

// mostLive is how many messages may have files open. They get half of the files that this
// process may have open, because the NIC needs some for each queue.
func mostLive() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return backlog
	}
	return int(max(min(limit.Cur, math.MaxInt32)/2/perMessage, 1))
}

// begin takes a message.
func (s *Store) begin(from netip.AddrPort, number uint32) (*incoming, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed || len(s.ended) >= backlog:
		return nil, errBacklog
	case len(s.live) >= s.most:
		return nil, errFiles
	}
	in := &incoming{store: s, begun: time.Now(), Received: Received{Source: from, Number: number}}
	s.live[in] = struct{}{}
	return in, nil
}

// end passes a message on to endAll.
func (s *Store) end(in *incoming) {
	s.mu.Lock()
	s.ended = append(s.ended, in)
	s.mu.Unlock()
	s.cond.Signal()
}

// incoming is a message on its way into a file, and its window.
type incoming struct {
	Received
	store *Store
	begun time.Time

	mu    sync.Mutex
	small *[small]byte // the message, while nothing of it is beyond
	part  *part        // the file that is written to
	file  *part        // the file that the message has become
	old   *os.File     // the file that had its name
	over  bool         // nothing more is written
}

var smalls = sync.Pool{New: func() any { return new([small]byte) }}

// Size implements spin.Window.
func (in *incoming) Size() int64 { return in.store.cfg.MaxSize }

// ReadAt implements spin.Window.
func (in *incoming) ReadAt(p []byte, off int64) (int, error) {
	if err := in.check("read", len(p), off); err != nil {
		return 0, err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	switch {
	case in.part != nil:
		return in.part.f.ReadAt(p, off)
	case in.small != nil:
		return copy(p, in.small[min(off, small):]), nil
	}
	return 0, nil
}

// WriteAt implements spin.Window.
func (in *incoming) WriteAt(p []byte, off int64) (n int, err error) {
	if err := in.check("write", len(p), off); err != nil {
		return 0, err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.over {
		return 0, os.ErrClosed
	}
	if in.part == nil {
		if in.small == nil {
			in.small = smalls.Get().(*[small]byte)
		}
		if off+int64(len(p)) <= small {
			return copy(in.small[off:], p), nil
		}
		if in.part, err = in.store.take(); err != nil {
			return 0, err
		}
		// Bytes that have not arrived yet will overwrite these.
		if _, err := in.part.write(in.small[:min(small, in.store.cfg.MaxSize)], 0); err != nil {
			return 0, err
		}
	}
	n, err = in.part.write(p, off)
	if in.part.wants() {
		select {
		case in.store.grow <- in.part:
		default:
			in.part.asked.Store(false) // a later packet asks again
		}
	}
	return n, err
}

func (in *incoming) check(what string, n int, off int64) error {
	if size := in.store.cfg.MaxSize; off < 0 || off > size || int64(n) > size-off {
		return fmt.Errorf("%s %d bytes at %d of a file of at most %d: %w", what, n, off, size, spin.ErrBounds)
	}
	return nil
}

// fail notes why there will be no file. The first reason stays.
func (in *incoming) fail(err error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.over = true
	if in.Err == nil {
		in.Err = err
	}
}

// publish gives the file, now n bytes long, its name.
func (in *incoming) publish(n uint64) (err error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.over {
		return os.ErrClosed
	}
	in.over = true
	switch p := in.part; {
	case p == nil && n == 0:
		in.file, err = in.store.create()
	case p == nil:
		err = in.copy(in.small[:n])
	case n <= copied && p.ready.Load() >= 2*int64(n):
		err = in.copy(p.mem[:n])
	default:
		in.file = p
		err = p.finish(int64(n))
	}
	if err != nil {
		return err
	}
	if err := in.sync(in.file.f); err != nil {
		return err
	}
	name := fmt.Sprintf("%s-%d-%d", in.Source.Addr(), in.Source.Port(), in.Number)
	if err := in.name(name); err != nil {
		return err
	}
	if err := in.sync(in.store.dir); err != nil {
		return fmt.Errorf("file %s is in its place, but may not outlast a crash of the machine: %w", name, err)
	}
	in.Path, in.Bytes, in.Took = filepath.Join(in.store.cfg.Dir, name), n, time.Since(in.begun)
	return nil
}

// sync waits until f is on disk, if the store is configured so.
func (in *incoming) sync(f *os.File) error {
	if !in.store.cfg.Sync {
		return nil
	}
	return f.Sync() // the error names the directory, as f was opened without a name
}

// copy makes a file of data.
func (in *incoming) copy(data []byte) (err error) {
	if in.file, err = in.store.create(); err == nil {
		_, err = in.file.f.Write(data)
	}
	return err
}

// name gives the file its name. It atomically replaces another file of that name.
func (in *incoming) name(name string) error {
	fd, dir := fmt.Sprintf("/proc/self/fd/%d", in.file.f.Fd()), int(in.store.dir.Fd())
	link := func(name string) error {
		return unix.Linkat(unix.AT_FDCWD, fd, dir, name, unix.AT_SYMLINK_FOLLOW)
	}
	err := link(name)
	if err == unix.EEXIST {
		// Keep the old file open: freeing a large one takes long, and must not
		// happen here.
		if old, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err == nil {
			in.old = os.NewFile(uintptr(old), name)
		}
		// Only a rename replaces a file, and that takes a temporary name. A file
		// of that name was left by a crash at this point.
		temp := ".xspin-" + name + ".part"
		if err = link(temp); err == unix.EEXIST {
			if err = unix.Unlinkat(dir, temp, 0); err == nil {
				err = link(temp)
			}
		}
		if err == nil {
			if err = unix.Renameat(dir, temp, dir, name); err != nil {
				err = errors.Join(err, unix.Unlinkat(dir, temp, 0))
			}
		}
	}
	if err != nil {
		return fmt.Errorf("name file %s in %s: %w", name, in.store.cfg.Dir, err)
	}
	return nil
}

// hash returns the file's checksum.
func (in *incoming) hash() (string, error) {
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(in.file.f, 0, int64(in.Bytes))); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// release releases memory and files.
func (in *incoming) release() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.over = true
	if in.small != nil {
		smalls.Put(in.small)
		in.small = nil
	}
	if in.part != nil && in.part != in.file {
		in.store.recycle(in.part)
	}
	if in.file != nil {
		in.store.discard(in.file)
	}
	in.part, in.file = nil, nil
	if in.old != nil {
		in.old.Close()
		in.old = nil
	}
}

// part is a file without a name. One message at a time writes, one goroutine extends.
type part struct {
	f     *os.File
	limit int64        // bytes
	high  atomic.Int64 // end of what was written
	ready atomic.Int64 // bytes from the start that are allocated and mapped
	asked atomic.Bool  // growAll was asked to extend it
	final atomic.Int64 // its final size, -1 while that is unknown

	prepared bool // see Store.prepare

	mu     sync.Mutex // taken by extend and close
	mem    []byte     // the mapping, of the largest size of the file
	closed bool
}

// errFault is the error for a fault in the mapping.
var errFault = errors.New("the file cannot be written where it was allocated: is the disk in order?")

// write copies into the mapping as far as it is ready, and otherwise makes a system call.
func (p *part) write(b []byte, off int64) (n int, err error) {
	end := off + int64(len(b))
	if end <= p.ready.Load() {
		n, err = guarded(p.mem[off:end], b)
	} else {
		n, err = p.f.WriteAt(b, off)
	}
	if end > p.high.Load() {
		p.high.Store(end)
	}
	return n, err
}

// guarded copies into mapped memory. A page that the kernel cannot provide becomes an
// error, instead of killing the process.
func guarded(dst, src []byte) (n int, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if recover() != nil {
			n, err = 0, errFault
		}
	}()
	return copy(dst, src), nil
}

// wants reports, once, that the file should be extended.
func (p *part) wants() bool {
	high, ready := p.high.Load(), p.ready.Load()
	return high > unmapped && ready < p.limit && ready < high+ahead(high)/2 && !p.asked.Load() && !p.asked.Swap(true)
}

// full is the size of the mapping.
func (p *part) full() int64 {
	page := int64(os.Getpagesize())
	return (p.limit + page - 1) &^ (page - 1)
}

// extend allocates and maps the file up to a size. After an error it is not called
// again: writes are then system calls, which return what is wrong.
func (p *part) extend(to int64) {
	to = min(to, p.full())
	for at := p.ready.Load(); at < to; at = p.ready.Load() {
		if !p.extendBy(at, min(step, p.full()-at)) {
			return
		}
	}
	p.asked.Store(false)
}

func (p *part) extendBy(at, n int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	fd := int(p.f.Fd())
	var err error
	if p.mem == nil {
		if p.mem, err = unix.Mmap(fd, 0, int(p.full()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
			return false
		}
	}
	// Here a full file system is an error. In a mapping it would be a signal.
	err = unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, at, n)
	if final := p.final.Load(); final >= 0 {
		_ = p.f.Truncate(final) // finished meanwhile: free the blocks again
		return false
	}
	if err != nil {
		return false
	}
	// EINVAL: Linux before 5.14, where pages are mapped when they are used.
	if err := unix.Madvise(p.mem[at:at+n], unix.MADV_POPULATE_WRITE); err != nil && err != unix.EINVAL {
		return false
	}
	p.ready.Store(at + n)
	return true
}

// finish sets the file's final size. It does not wait for extend.
func (p *part) finish(n int64) error {
	p.final.Store(n)
	return p.f.Truncate(n)
}

func (p *part) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	if p.mem != nil {
		p.ready.Store(0)
		_ = unix.Munmap(p.mem)
		p.mem = nil
	}
	p.f.Close()
}

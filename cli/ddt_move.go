// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"os/signal"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/ddt"
)

// moveBytes is how much of a stream is in memory at a time.
const moveBytes = 1 << 20

// A datatypeMove has the flags of pack and unpack.
type datatypeMove struct {
	elements int64
	in, out  string
	origin   string
	at       int64 // what origin says
}

func (m *datatypeMove) add(cmd *cobra.Command, in, out string) {
	fl := cmd.Flags()
	fl.StringVar(&m.in, "in", "", in+", - for standard input (required)")
	fl.StringVar(&m.out, "out", "", out+", - for standard output (required)")
	fl.StringVar(&m.origin, "origin", "0", "where in the image the type's displacement 0 is, such as 64 or 4KiB")
	countFlag(cmd, &m.elements)
	_ = cmd.MarkFlagRequired("in") // fails only for a flag that does not exist
	_ = cmd.MarkFlagRequired("out")
}

// commit commits the type, and checks what can be checked before reading anything.
func (m *datatypeMove) commit(cmd *cobra.Command, text string) (*ddt.Committed, error) {
	var err error
	if m.at, err = sizeFlag("origin", m.origin); err != nil {
		return nil, err
	}
	t, n, err := datatypeArg(text, m.elements)
	if err != nil {
		return nil, err
	}
	c, err := ddt.Commit(t, n)
	if err != nil {
		return nil, err
	}
	lo, hi := c.Bounds()
	switch {
	case lo < -m.at:
		return nil, fmt.Errorf("the type starts %d bytes before its origin, and the image only --origin %d before it: want --origin %d or more", -lo, m.at, -lo)
	case hi > math.MaxInt64-m.at:
		return nil, fmt.Errorf("the type ends %d bytes after its origin, which with --origin %d does not fit in 64 bits", hi, m.at)
	case m.out == "-" && isTerminal(cmd.OutOrStdout()):
		return nil, errors.New("standard output is a terminal, and memory is not text: pipe it into xxd, or name a file")
	case m.in == "-" && isTerminal(cmd.InOrStdin()):
		return nil, errors.New("standard input is a terminal: redirect a file to it, or name one")
	}
	return c, nil
}

func newDDTPackCmd() *cobra.Command {
	var m datatypeMove
	cmd := &cobra.Command{
		Use:   "pack TYPE --in IMAGE --out STREAM",
		Short: "Gather the bytes of a type from an image of memory to a stream",
		Long: `Gather the bytes of a type from an image of memory, in the order of a message.
The image must reach to the last byte that the type touches, and may be larger.

` + datatypeHelp,
		Example: `  xspin ddt pack 'vec(4 2 5)[int]' --in matrix --out columns
  xspin ddt pack @halo.ddt --count 8 --origin 4KiB --in image --out - | xxd`,
		Args: wantArgs("TYPE"),
	}
	m.add(cmd, "image of memory to read", "stream to write")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
		defer stop()
		if err := m.pack(ctx, cmd, args[0]); err != nil {
			return fmt.Errorf("ddt pack: %w", err)
		}
		return nil
	}
	return cmd
}

func (m *datatypeMove) pack(ctx context.Context, cmd *cobra.Command, text string) (err error) {
	c, err := m.commit(cmd, text)
	if err != nil {
		return err
	}
	_, hi := c.Bounds()
	img, err := readImage(cmd, m.in, max(0, m.at+hi))
	if err != nil {
		return err
	}
	defer img.close()
	if err := img.check(c, m.in, m.at); err != nil {
		return err
	}
	out, err := createOutput(cmd, m.out)
	if err != nil {
		return err
	}
	defer out.discard()
	buf := make([]byte, min(moveBytes, c.Size()))
	for first := int64(0); first < c.Size() && ctx.Err() == nil; first += int64(len(buf)) {
		buf = buf[:min(int64(len(buf)), c.Size()-first)]
		if _, err := c.Pack(buf, img.bytes, m.at, first); err != nil {
			return err
		}
		if _, err := out.Write(buf); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	return out.finish()
}

func newDDTUnpackCmd() *cobra.Command {
	var m datatypeMove
	var from string
	cmd := &cobra.Command{
		Use:   "unpack TYPE --in STREAM --out IMAGE",
		Short: "Scatter the bytes of a stream to an image of memory",
		Long: `Scatter the bytes of a stream, those of a message, to their places in memory
according to a type. The stream must be as long as the type.

The image is a new one and replaces an existing file: holes are zero, and take no
room on the disk. It ends where the next element would begin, or at the last byte
if that is further; files of demo datatypes --serve --dir end at the last byte,
and pack needs no more than that. With --image it starts as a copy of another
image, whose bytes stay as they are in holes and around; that may be the file
that is written.

` + datatypeHelp,
		Example: `  xspin ddt unpack 'vec(4 2 5)[int]' --in columns --out matrix
  xspin ddt unpack 'vec(4 2 5)[int]' --in columns --image matrix --out matrix
  xspin ddt unpack @halo.ddt --count 8 --origin 4KiB --in stream --image before --out after`,
		Args: wantArgs("TYPE"),
	}
	m.add(cmd, "stream to read", "image of memory to write")
	cmd.Flags().StringVar(&from, "image", "", "image of memory to start with (default zeros)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
		defer stop()
		if err := m.unpack(ctx, cmd, args[0], from); err != nil {
			return fmt.Errorf("ddt unpack: %w", err)
		}
		return nil
	}
	return cmd
}

func (m *datatypeMove) unpack(ctx context.Context, cmd *cobra.Command, text, from string) (err error) {
	c, err := m.commit(cmd, text)
	if err != nil {
		return err
	}
	in, size, err := openStream(cmd, m.in)
	if err != nil {
		return err
	}
	defer in.Close()
	if size >= 0 && size != c.Size() {
		return streamSizeError(m.in, size, c)
	}
	out, err := createOutput(cmd, m.out)
	if err != nil {
		return err
	}
	defer out.discard()
	var img *image
	if from == "" {
		img, err = out.image(m.size(c), c.Size(), nil)
	} else {
		img, err = m.begin(c, out, from)
	}
	if err != nil {
		return err
	}
	defer img.close()

	buf := make([]byte, min(moveBytes, c.Size()))
	for first := int64(0); first < c.Size() && ctx.Err() == nil; first += int64(len(buf)) {
		buf = buf[:min(int64(len(buf)), c.Size()-first)]
		if n, err := io.ReadFull(in, buf); errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return streamSizeError(m.in, first+int64(n), c)
		} else if err != nil {
			return err
		}
		if err := img.reserve(c, m.at, first, first+int64(len(buf))); err != nil {
			return err
		}
		if _, err := c.Unpack(img.bytes, m.at, first, buf); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	switch more, err := io.Copy(io.Discard, in); {
	case err != nil:
		return err
	case more > 0:
		return streamSizeError(m.in, c.Size()+more, c)
	}
	if !img.stored {
		if _, err := out.Write(img.bytes); err != nil {
			return err
		}
	}
	return out.finish()
}

// begin returns an image that starts with the contents of a file.
func (m *datatypeMove) begin(c *ddt.Committed, out *output, path string) (*image, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	if err := checkImage(c, path, info.Size(), m.at); err != nil {
		return nil, err
	}
	return out.image(info.Size(), c.Size(), f)
}

// size returns the length of an image for the type: it ends after the last byte, but not
// before the place where another element would start.
func (m *datatypeMove) size(c *ddt.Committed) int64 {
	_, hi := c.Bounds()
	t := c.Type()
	if n := c.Count(); n > 0 && t.Extent() > 0 && t.Extent() <= (math.MaxInt64-m.at-max(0, t.UB()))/n {
		hi = max(hi, (n-1)*t.Extent()+t.UB())
	}
	return m.at + max(0, hi)
}

func streamSizeError(path string, size int64, c *ddt.Committed) error {
	return fmt.Errorf("%s has %s: want %d, %s of %d", streamName(path), count64(size, "byte"), c.Size(), count64(c.Count(), "element"), c.Type().Size())
}

func checkImage(c *ddt.Committed, path string, size, origin int64) error {
	if _, hi := c.Bounds(); hi > size-origin {
		return fmt.Errorf("%s has %s: want %d or more, because the type ends %d after its origin, which is at %d", streamName(path), count64(size, "byte"), origin+hi, hi, origin)
	}
	return nil
}

func streamName(path string) string {
	if path == "-" {
		return "standard input"
	}
	return path
}

// openStream opens a stream to read. Its size is -1 if it is not known before reading.
func openStream(cmd *cobra.Command, path string) (io.ReadCloser, int64, error) {
	if path == "-" {
		return io.NopCloser(cmd.InOrStdin()), -1, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	if !info.Mode().IsRegular() {
		return f, -1, nil
	}
	return f, info.Size(), nil
}

// An image is memory, mapped from a file or not.
type image struct {
	bytes  []byte
	size   int64 // of the file that bytes start with
	stored bool  // the file is the output
	mapped bool
	out    *output // its file has blocks only where reserve made room; nil: everywhere
}

func (m *image) close() {
	if m.mapped {
		_ = unix.Munmap(m.bytes)
		m.mapped = false
	}
}

func (m *image) check(c *ddt.Committed, path string, origin int64) error {
	return checkImage(c, path, m.size, origin)
}

// readImage returns an image, of which size bytes are needed.
func readImage(cmd *cobra.Command, path string, size int64) (*image, error) {
	in, have, err := openStream(cmd, path)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	if have < 0 {
		b, err := io.ReadAll(io.LimitReader(in, size))
		if err != nil {
			return nil, err
		}
		// Read the rest, so that the writer of a pipe does not fail.
		_, err = io.Copy(io.Discard, in)
		return &image{bytes: b, size: int64(len(b))}, err
	}
	if have == 0 || have < size {
		return &image{size: have}, nil
	}
	b, err := mapFile(in.(*os.File), have, unix.PROT_READ)
	return &image{bytes: b, size: have, mapped: true}, err
}

func mapFile(f *os.File, size int64, prot int) ([]byte, error) {
	b, err := unix.Mmap(int(f.Fd()), 0, int(size), prot, unix.MAP_SHARED)
	if err != nil {
		return nil, &os.PathError{Op: "mmap", Path: f.Name(), Err: err}
	}
	return b, nil
}

// An output is a file that appears only when it is complete, or something that cannot be
// replaced, such as a pipe.
type output struct {
	io.Writer
	path string
	tmp  *os.File // to become path; nil: Writer is the output itself
	f    *os.File // Writer, if it is to be closed
}

// createOutput checks that an output can be written. An existing file does not change until
// finish.
func createOutput(cmd *cobra.Command, path string) (*output, error) {
	if path == "-" {
		return &output{Writer: cmd.OutOrStdout()}, nil
	}
	mode := fs.FileMode(0o666) // less umask
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case info.IsDir():
		return nil, fmt.Errorf("%s is a directory", path)
	case !info.Mode().IsRegular():
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		return &output{Writer: f, f: f}, err
	default:
		mode = info.Mode().Perm()
		if path, err = filepath.EvalSymlinks(path); err != nil {
			return nil, err
		}
	}
	tmp, err := os.OpenFile(fmt.Sprintf("%s.%d.tmp", path, os.Getpid()), os.O_RDWR|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return nil, err
	}
	o := &output{Writer: tmp, path: path, tmp: tmp}
	if info != nil {
		if err := tmp.Chmod(mode); err != nil { // the file was created less umask
			o.discard()
			return nil, err
		}
	}
	return o, nil
}

// image returns size bytes of memory, with the contents of a file or zeros, which become
// the output if that is a file. touched is how many of them will be written.
func (o *output) image(size, touched int64, begin *os.File) (*image, error) {
	if o.tmp == nil {
		if size == 0 {
			return &image{}, nil
		}
		b, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return nil, fmt.Errorf("memory for an image of %d bytes: %w", size, err)
		}
		m := &image{bytes: b, size: size, mapped: true}
		if begin != nil {
			if _, err := io.ReadFull(begin, b); err != nil {
				m.close()
				return nil, fmt.Errorf("%s: %w", begin.Name(), err)
			}
		}
		return m, nil
	}
	if begin != nil {
		if err := copyData(o.tmp, begin, size); err != nil {
			return nil, err
		}
	}
	if size == 0 {
		return &image{stored: true}, nil
	}
	if err := o.tmp.Truncate(size); err != nil {
		return nil, o.noRoom(size, err)
	}
	m := &image{size: size, stored: true, mapped: true}
	if size > moveBytes && touched < size/2 {
		m.out = o // most of it is holes
	} else if err := o.allocate(0, size); err != nil {
		return nil, err
	}
	var err error
	m.bytes, err = mapFile(o.tmp, size, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil { // a tmpfs has files that are larger than any address space
		return nil, o.noRoom(size, err)
	}
	return m, nil
}

// reserve makes room on disk for bytes first to last-1 of a stream, but not for the holes
// between them.
func (m *image) reserve(c *ddt.Committed, origin, first, last int64) (err error) {
	if m.out == nil {
		return nil
	}
	var from, to int64 // whole pages that are not yet reserved
	c.Each(first, last, func(off, n int64) bool {
		off += origin
		lo, hi := off&^(pageBytes-1), min(m.size, (off+n+pageBytes-1)&^(pageBytes-1))
		if lo <= to && hi >= from {
			from, to = min(from, lo), max(to, hi)
			return true
		}
		err = m.out.allocate(from, to)
		from, to = lo, hi
		return err == nil
	})
	return cmp.Or(err, m.out.allocate(from, to))
}

// pageBytes is the size of a page.
const pageBytes = 4096

// allocate makes room for bytes from to to-1 of the file. Without it, writing to the memory
// would kill the process if the disk is full. Not all file systems can do it.
func (o *output) allocate(from, to int64) error {
	if from == to {
		return nil
	}
	err := unix.Fallocate(int(o.tmp.Fd()), unix.FALLOC_FL_KEEP_SIZE, from, to-from)
	for errors.Is(err, unix.EINTR) {
		err = unix.Fallocate(int(o.tmp.Fd()), unix.FALLOC_FL_KEEP_SIZE, from, to-from)
	}
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return o.noRoom(to-from, err)
	}
	return nil
}

func (o *output) noRoom(size int64, err error) error {
	return fmt.Errorf("%s: room for %d bytes: %w", o.path, size, err)
}

// copyData copies size bytes of a file to an empty one, and keeps holes.
func copyData(to, from *os.File, size int64) error {
	for at := int64(0); at < size; {
		data, err := unix.Seek(int(from.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // nothing but a hole
		}
		if err != nil { // a file system without holes
			data = at
		}
		end, err := unix.Seek(int(from.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			end = size
		}
		end = min(end, size)
		if data >= end {
			break
		}
		if _, err := to.Seek(data, io.SeekStart); err != nil {
			return err
		}
		if _, err := from.Seek(data, io.SeekStart); err != nil {
			return err
		}
		if _, err := io.CopyN(to, from, end-data); err != nil {
			return err
		}
		at = end
	}
	return nil
}

// finish puts the file in its place.
func (o *output) finish() error {
	if o.tmp == nil {
		if o.f == nil {
			return nil
		}
		return o.f.Close()
	}
	if err := o.tmp.Close(); err != nil {
		return err
	}
	if err := os.Rename(o.tmp.Name(), o.path); err != nil {
		return err
	}
	o.tmp = nil
	return nil
}

// discard removes the file unless finish has put it in its place.
func (o *output) discard() {
	if o.tmp != nil {
		_ = o.tmp.Close()
		_ = os.Remove(o.tmp.Name())
	}
	if o.f != nil {
		_ = o.f.Close()
	}
}

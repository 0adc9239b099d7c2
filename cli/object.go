// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf/ringbuf"
	"github.com/spf13/cobra"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/internal/pcapng"
	"github.com/xspin/xspin/internal/regular"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/spin"
)

// newObjectCmd returns `xspin object`.
func newObjectCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "object",
		Short: "Write handlers in eBPF, and check their object files",
		Long: `Handlers in eBPF run in the kernel, where the packet arrives. They are written in
C and compiled by clang to an object file: docs/kernel-handlers.md.`,
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(newObjectNewCmd(), newObjectCheckCmd())
	return cmd
}

// What `object new` writes beside the headers.
var (
	//go:embed object/echo.bpf.c
	exampleSource string
	//go:embed object/sum.bpf.c
	messagesSource string
	//go:embed object/Makefile
	exampleMakefile string
)

func newObjectNewCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "new DIR",
		Short: "Make a folder to write handlers in",
		Long: `Write xspin_handler.h, for handlers of packets, and xspin_message.h, for those of
messages, an example of each and a Makefile into a folder, which is made if it is not
there. A source or Makefile that is there stays; headers become those of this version.`,
		Example: "  xspin object new my-handlers && cd my-handlers && make",
		Args:    wantArgs("DIR"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := newObject(cmd.OutOrStdout(), args[0]); err != nil {
				return fmt.Errorf("object new: %w", err)
			}
			return nil
		},
	}
}

func newObject(out io.Writer, dir string) error {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	say := func(what, path string) { fmt.Fprintf(out, "%-8s %s\n", what, path) }
	headers, err := fs.Glob(loader.Include(), "*.h")
	if err != nil {
		return err
	}
	for _, name := range headers {
		text, err := fs.ReadFile(loader.Include(), name)
		if err != nil {
			return err
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o666); err != nil {
			return err
		}
		say("written", path)
	}
	// The examples are for a folder without sources.
	sources, err := filepath.Glob(filepath.Join(dir, "*.bpf.c"))
	if err != nil {
		return err
	}
	files := [][2]string{{"Makefile", exampleMakefile}}
	if len(sources) == 0 {
		files = append(files, [2]string{"echo.bpf.c", exampleSource}, [2]string{"sum.bpf.c", messagesSource})
	}
	for _, f := range files {
		path := filepath.Join(dir, f[0])
		w, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		if errors.Is(err, fs.ErrExist) {
			say("stays", path)
			continue
		}
		if err != nil {
			return err
		}
		_, err = w.WriteString(f[1])
		if err := errors.Join(err, w.Close()); err != nil {
			return err
		}
		say("written", path)
	}
	return nil
}

// objectReport is what `object check` says about an object.
type objectReport struct {
	Schema       int                `json:"schema,omitempty"` // of a document with nothing else
	File         string             `json:"file"`
	Handlers     []string           `json:"handlers"`
	Maps         []string           `json:"maps"`     // of its own
	OwnMaps      []spin.OwnMap      `json:"own_maps"` // these, and sections of global variables
	MapBytes     int64              `json:"map_bytes"`
	Parameters   []loader.Parameter `json:"parameters"`
	Trains       bool               `json:"trains"`       // they get trains whole, at tc
	Instructions int                `json:"instructions"` // of the program at xdp
	Verified     int                `json:"verified"`     // steps of the verifier for it; 0: the kernel does not tell
	Hooks        []objectHook       `json:"hooks"`
	Frames       []objectVerdict    `json:"frames,omitempty"`
	Open         []openMessage      `json:"open,omitempty"` // when the capture ends
	User         []userCounter      `json:"user,omitempty"` // counters that are not 0
}

// objectHook is what it says about a hook.
type objectHook struct {
	Hook         string   `json:"hook"`
	Instructions int      `json:"instructions,omitempty"` // of the program in the kernel
	Verified     int      `json:"verified,omitempty"`     // steps of the verifier; 0: the kernel does not tell
	Why          []string `json:"why,omitempty"`          // it does not run there
}

// objectVerdict is what it says about a frame.
type objectVerdict struct {
	Number   int      `json:"number"`             // from 1, as Wireshark counts
	Length   int      `json:"length"`             // bytes on the wire
	Captured int      `json:"captured"`           // bytes in the file; the verdict is about these
	Verdict  string   `json:"verdict"`            // of the frame: send, drop, stack, handed over, malformed, error
	Segment  string   `json:"segment,omitempty"`  // with handlers of messages: taken, again, ignored, handed over, failed
	Why      string   `json:"why,omitempty"`      // of the segment
	Answered bool     `json:"answered,omitempty"` // it has become its answer
	Mute     bool     `json:"mute,omitempty"`     // the frame has no room for one
	Code     string   `json:"code,omitempty"`
	Failed   string   `json:"failed,omitempty"` // the handler that failed
	Told     []string `json:"told,omitempty"`   // ends of messages, and what handlers say
	Error    string   `json:"error,omitempty"`
}

type userCounter struct {
	Number int `json:"number"`
	spin.UserCounter
}

// objectFlags are the flags of `object check`.
type objectFlags struct {
	pcap, write, format, memory, hpuMemory, window string
	params                                         []string
	json                                           bool
}

func newObjectCheckCmd() *cobra.Command {
	var f objectFlags
	cmd := &cobra.Command{
		Use:   "check FILE...",
		Short: "Check object files, and try their handlers on a capture",
		Long: `Check object files as a context would that has them, up to and including the kernel's
verifier, at each hook where they run, and show what they have. It needs root, and changes nothing: what was loaded
is gone when the command ends. All files are checked, and the command fails if one is refused at xdp. What is
against one at tc is shown.

With --pcap each frame of an Ethernet capture (pcap or pcapng) is given to the
handlers, whatever rulesets would say of it, and the verdict is printed: send (back
to where it came from), drop, stack (on to Linux), or malformed (shorter than the
message format wants: on to Linux). No frame is sent anywhere. At the end are the user
counters that the handlers have added to.

Handlers of messages get four windows. Of each segment is printed what becomes of it:
taken (the handlers have had it, or it is in the window), again (it was taken before),
ignored (and why), handed over (to handlers in Go, which are not run here), or failed; and
whether it was answered, as on a NIC. What would be told is printed behind it: ends of
messages, xspin_notify and xspin_log. Messages that are open when the capture ends are
counted, with the bytes that were taken.

With --write the frames that would be sent, and those that go on to Linux, are written
to a capture (pcapng) as the handlers leave them. A comment at each says which frame of
the other capture it was, and the verdict; the direction of those that are sent is out.`,
		Example: `  sudo xspin object check echo.bpf.o
  sudo xspin object check *.bpf.o
  sudo xspin object check echo.bpf.o -r trace.pcap --format flow --param port=7
  sudo xspin object check echo.bpf.o -r trace.pcap -w after.pcapng`,
		Args: wantArgs("FILE..."),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkObjects(cmd, args, f); err != nil {
				return fmt.Errorf("object check: %s", ownLines(err))
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&f.pcap, "pcap", "r", "", "capture to try the handlers on, pcap or pcapng")
	cmd.Flags().StringVarP(&f.write, "write", "w", "", "capture to write, with the frames as the handlers leave them")
	cmd.Flags().StringVar(&f.format, "format", "", "message format: packet or flow, or slmp for handlers of messages (default packet, or slmp)")
	flags.OneOf(cmd.Flags(), "format", []string{"packet", "flow", "slmp"})
	cmd.Flags().StringArrayVar(&f.params, "param", nil, "set a parameter, NAME=VALUE (repeatable)")
	cmd.Flags().StringVar(&f.memory, "memory", control.Size(loader.DefaultMemory).String(), "HPU memory of the context, if the handlers use it")
	cmd.Flags().StringVar(&f.hpuMemory, "hpu-memory", control.Size(loader.DefaultHPUMemory).String(), "HPU memory of each HPU, if they use that")
	cmd.Flags().StringVar(&f.window, "window", "1MiB", "size of each window, for handlers of messages")
	cmd.Flags().BoolVar(&f.json, "json", false, "print one JSON document; of several files with a list, objects")
	return cmd
}

// checkLimit is how much memory the maps of an object may take.
const checkLimit = 64 << 20

// checkObjects checks files, and says of all what is wrong.
func checkObjects(cmd *cobra.Command, paths []string, f objectFlags) (err error) {
	if !slices.Contains([]string{"", "packet", "flow", "slmp"}, f.format) {
		return flags.Error("format", f.format, "want packet, flow or slmp")
	}
	if f.write != "" {
		if f.pcap == "" {
			return errors.New("--write goes with --pcap, whose frames the handlers get")
		}
		if sameFile(f.pcap, f.write) {
			return flags.Error("write", f.write, "want another file than that of --pcap")
		}
		if len(paths) > 1 {
			return errors.New("--write goes with one FILE, whose handlers leave the frames")
		}
	}
	out := bufio.NewWriter(cmd.OutOrStdout())
	defer func() { err = errors.Join(err, out.Flush()) }()
	all := []*objectReport{}
	var errs []error
	for _, path := range paths {
		r, err := checkObject(cmd.ErrOrStderr(), out, path, len(all) > 0, f)
		if r != nil {
			all = append(all, r)
		}
		for _, err := range spin.Flatten(err) {
			// An error that names no file is the command's own.
			if !slices.ContainsFunc(errs, func(e error) bool { return e.Error() == err.Error() }) {
				errs = append(errs, err)
			}
		}
	}
	switch {
	case !f.json:
	case len(paths) > 1:
		errs = append(errs, writeJSON(out, map[string]any{"schema": 1, "objects": all}))
	case len(all) == 1:
		all[0].Schema = 1
		errs = append(errs, writeJSON(out, all[0]))
	}
	return errors.Join(errs...)
}

// checkObject checks a file, and returns nil for one that is refused. Each error about the file names it.
func checkObject(warn, out io.Writer, path string, another bool, f objectFlags) (r *objectReport, err error) {
	file, err := regular.Read(path, loader.MaxObjectFile)
	if err != nil {
		return nil, err
	}
	o, err := loader.ReadObject(path, file, checkLimit)
	if err != nil {
		return nil, err
	}
	if f.format == "" {
		f.format = map[bool]string{false: "packet", true: "slmp"}[o.Messages()]
	}
	cfg := loader.HandlersConfig{Format: matcher.FormatByName(f.format)}
	if cfg.Parameters, err = parseParams(o, f.params); err != nil {
		var errs []error
		for _, err := range spin.Flatten(err) {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
		return nil, errors.Join(errs...)
	}
	if err := loader.NeedVerifier(); err != nil {
		return nil, err
	}
	free, err := f.giveMemory(o, &cfg)
	defer free()
	if err != nil {
		return nil, err
	}
	h, err := o.Load(cfg)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.Close()) }()

	r = &objectReport{
		File: path, Handlers: o.Handlers(), Maps: append([]string{}, o.Maps()...), OwnMaps: append([]spin.OwnMap{}, o.OwnMaps()...), MapBytes: o.Memory(),
		Parameters: append([]loader.Parameter{}, o.Parameters()...), Trains: o.Trains(),
	}
	if r.Instructions, r.Verified, err = h.Instructions(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	r.Hooks = []objectHook{{Hook: h.Hook().String(), Instructions: r.Instructions, Verified: r.Verified}, checkAtTC(o, cfg)}
	if !f.json {
		if another {
			fmt.Fprintln(out)
		}
		r.print(out)
	}
	if f.pcap != "" {
		err = r.try(warn, out, h, &f)
	}
	return r, err
}

// checkAtTC loads an object for tc, too. It is good without: it runs at xdp.
func checkAtTC(o *loader.Object, cfg loader.HandlersConfig) objectHook {
	cfg.Hook = loader.TC
	at := objectHook{Hook: cfg.Hook.String()}
	err := o.CheckHook(cfg.Hook)
	if err == nil {
		var h *loader.Handlers
		if h, err = o.Load(cfg); err == nil {
			at.Instructions, at.Verified, err = h.Instructions()
			err = errors.Join(err, h.Close())
		}
	}
	for _, err := range spin.Flatten(err) {
		at.Why = append(at.Why, err.Error())
	}
	return at
}

// sameFile tells whether two paths lead to one file.
func sameFile(a, b string) bool {
	x, err1 := os.Stat(a)
	y, err2 := os.Stat(b)
	return err1 == nil && err2 == nil && os.SameFile(x, y)
}

// parseParams reads NAME=VALUE, and says of all what is wrong.
func parseParams(o *loader.Object, args []string) (map[string]any, error) {
	params := map[string]any{}
	var errs []error
	for _, arg := range args {
		name, text, ok := strings.Cut(arg, "=")
		if !ok {
			return nil, flags.Error("param", arg, "want NAME=VALUE")
		}
		all := o.Parameters()
		i := slices.IndexFunc(all, func(p loader.Parameter) bool { return p.Name == name })
		if i < 0 {
			errs = append(errs, o.CheckParameters(map[string]any{name: text})) // says which there are
			continue
		}
		value, err := all[i].Parse(text)
		errs = append(errs, err)
		params[name] = value
	}
	return params, errors.Join(errs...)
}

// giveMemory makes the HPU memory that an object uses: without any, the verifier would
// skip the code that uses it.
func (f *objectFlags) giveMemory(o *loader.Object, cfg *loader.HandlersConfig) (free func(), err error) {
	var made []*hostq.Memory
	free = func() {
		for _, m := range made {
			_ = m.Close()
		}
	}
	memory, err := memoryFlag("memory", f.memory)
	if err != nil {
		return free, err
	}
	hpuMemory, err := memoryFlag("hpu-memory", f.hpuMemory)
	if err != nil {
		return free, err
	}
	window, err := memoryFlag("window", f.window)
	if err != nil {
		return free, err
	}
	if o.Messages() {
		cfg.Messages = loader.MessagesConfig{Protocol: loader.SLMP, Events: 1 << 20}
		for range loader.MaxWindows {
			m, err := hostq.NewMemory("check", window)
			if err != nil {
				return free, err
			}
			made = append(made, m)
			cfg.Messages.Windows = append(cfg.Messages.Windows, loader.WindowConfig{Map: m.Map(), Size: window, Rights: spin.All})
		}
	}
	memory, hpuMemory = o.MemoryFor(memory, hpuMemory)
	shared, each := o.UsesMemory()
	if shared {
		m, err := hostq.NewMemory("check", memory)
		if err != nil {
			return free, err
		}
		made = append(made, m)
		cfg.Memory, cfg.MemorySize = m.Map(), memory
	}
	if each {
		cpus, err := loader.PossibleCPUs()
		if err != nil {
			return free, err
		}
		m, err := hostq.NewMemory("check", hpuMemory*int64(cpus))
		if err != nil {
			return free, err
		}
		made = append(made, m)
		cfg.HPUMemory, cfg.HPUMemorySize = m.Map(), hpuMemory
	}
	return free, nil
}

// memoryFlag reads how much memory there is: some, or the flag is left out.
func memoryFlag(name, text string) (int64, error) {
	n, err := sizeFlag(name, text)
	if err == nil && n == 0 {
		err = flags.Error(name, text, "want at least 1 byte")
	}
	return n, err
}

// print shows what an object has.
func (r *objectReport) print(w io.Writer) {
	list := func(all []string) string {
		if len(all) == 0 {
			return "none"
		}
		return strings.Join(all, ", ")
	}
	fmt.Fprintf(w, "%s\n", r.File)
	fmt.Fprintf(w, "  handlers      %s\n", list(r.Handlers))
	r.printHooks(w)
	if len(r.OwnMaps) == 0 {
		fmt.Fprintln(w, "  maps          none")
	} else {
		fmt.Fprintf(w, "  maps          %v for each context\n", control.Size(r.MapBytes))
	}
	for i := range r.OwnMaps {
		fmt.Fprintf(w, "                %s: %v\n", r.OwnMaps[i].Name, &r.OwnMaps[i])
	}
	for i, p := range r.Parameters {
		fmt.Fprintf(w, "  %-12s  %s = %s: %s\n", map[bool]string{true: "parameters"}[i == 0], p.Name, p.Default, p.Want)
	}
	var sizes, steps []string
	for _, at := range r.Hooks {
		if at.Why == nil {
			sizes = append(sizes, fmt.Sprintf("%d at %s", at.Instructions, at.Hook))
		}
		if at.Verified > 0 {
			steps = append(steps, fmt.Sprint(at.Verified))
		}
	}
	fmt.Fprintf(w, "  instructions  %s", strings.Join(sizes, ", "))
	if len(steps) > 0 {
		fmt.Fprintf(w, ", which took the verifier %s steps", strings.Join(steps, " and "))
	}
	fmt.Fprintln(w)
}

// printHooks shows where an object runs, and what is against the others.
func (r *objectReport) printHooks(w io.Writer) {
	var runs, not []string
	for _, at := range r.Hooks {
		if at.Why == nil {
			runs = append(runs, at.Hook)
		}
		for _, why := range at.Why {
			not = append(not, fmt.Sprintf("not %s: %s", at.Hook, why))
		}
	}
	fmt.Fprintf(w, "  hooks         %s\n", strings.Join(append([]string{strings.Join(runs, ", ")}, not...), "\n                "))
	if r.Trains {
		fmt.Fprintln(w, "  trains        whole, as the frame that each is at tc")
	}
}

// try gives the frames of a capture to the handlers.
func (r *objectReport) try(warn, w io.Writer, h *loader.Handlers, f *objectFlags) (err error) {
	file, err := regular.Open(f.pcap)
	if err != nil {
		return err
	}
	defer file.Close()
	c, err := pcapng.NewReader(file)
	if err != nil {
		return fmt.Errorf("%s: %w", f.pcap, err)
	}
	after := newAfter(f)
	defer func() { err = errors.Join(err, after.close()) }()
	messages := h.Events() != nil
	width, titles := 9, [2]string{"VERDICT", "CODE"}
	if messages {
		width, titles = 11, [2]string{"SEGMENT", "WHAT"}
	}
	line := func(number, length, verdict, code any) {
		if !f.json {
			fmt.Fprintln(w, strings.TrimRight(fmt.Sprintf("%7v %11v  %-*v  %v", number, length, width, verdict, code), " "))
		}
	}
	if !f.json {
		fmt.Fprintln(w)
	}
	line("FRAME", "LENGTH", titles[0], titles[1])
	told, err := newTold(h)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, told.close()) }()
	r.Frames = []objectVerdict{}
	counts := map[string]int{}
	var cut, failed int
	for {
		var frame pcapng.Frame
		if err := c.Next(&frame); err == io.EOF {
			break
		} else if err != nil {
			return fmt.Errorf("%s: after frame %d: %w", f.pcap, len(r.Frames), err)
		}
		v, left := verdictOn(h, &frame)
		v.Number = frame.Number
		v.Told = told.read()
		if err := after.frame(&v, left); err != nil {
			return err
		}
		r.Frames = append(r.Frames, v)
		counts[v.Verdict]++
		length, code := fmt.Sprint(v.Length), v.Code
		if v.Captured < v.Length {
			cut++
			length = fmt.Sprintf("%d/%d", v.Captured, v.Length)
		}
		if v.Failed != "" {
			failed++
			code = fmt.Sprintf("%s, from the %s handler", v.Code, v.Failed)
		}
		verdict := v.Verdict
		if v.Segment != "" {
			verdict, code = v.Segment, v.what()
		}
		line(v.Number, length, verdict, code+v.Error)
		for _, t := range v.Told {
			line("", "", "", t)
		}
	}
	for i, u := range h.Stats().User {
		if u.Count > 0 {
			r.User = append(r.User, userCounter{i, u})
		}
	}
	for _, m := range h.OpenMessages() {
		r.Open = append(r.Open, openMessage{m.Key[slmpNumber], m.Bytes})
	}
	if !f.json {
		if messages {
			r.summary(w)
		} else {
			fmt.Fprintf(w, "%s: %d send, %d drop, %d stack, %d malformed", count(len(r.Frames), "frame"), counts["send"], counts["drop"], counts["stack"], counts["malformed"])
			if failed > 0 {
				fmt.Fprintf(w, "; handlers failed on %d", failed)
			}
			fmt.Fprintln(w)
		}
		for _, u := range r.User {
			fmt.Fprintf(w, "user counter %d: sum %d, count %d\n", u.Number, u.Sum, u.Count)
		}
	}
	if cut > 0 {
		fmt.Fprintf(warn, "warning: %d of %s cut short by the capture: the verdicts are about the bytes in the file; capture with -s 0\n", cut, count(len(r.Frames), "frame"))
	}
	if n := counts["error"]; n > 0 {
		return fmt.Errorf("%s: %d of %s without a verdict", f.pcap, n, count(len(r.Frames), "frame"))
	}
	return nil
}

// slmpNumber is the word of a message's key that has its number.
const slmpNumber = 3

// A told reads what a frame has led to: ends of messages, and what handlers say. Nil for
// handlers of packets.
type told struct{ events *ringbuf.Reader }

func newTold(h *loader.Handlers) (*told, error) {
	if h.Events() == nil {
		return nil, nil
	}
	r, err := ringbuf.NewReader(h.Events())
	if err != nil {
		return nil, err
	}
	r.SetDeadline(time.Unix(1, 0)) // nothing comes later
	return &told{r}, nil
}

func (t *told) read() (all []string) {
	for t != nil {
		rec, err := t.events.Read()
		if err != nil {
			break
		}
		if e, ok := loader.ReadEvent(rec.RawSample); ok {
			number := e.Key[slmpNumber]
			switch spin.Cause(e.Cause) {
			case spin.Complete:
				all = append(all, fmt.Sprintf("message %d is complete: %d bytes", number, e.Length))
			default:
				all = append(all, fmt.Sprintf("message %d has failed", number))
			}
		} else if n, ok := loader.ReadNote(rec.RawSample); ok && n.Log {
			all = append(all, "log: "+n.Text)
		} else if ok {
			all = append(all, fmt.Sprintf("notify: %d, %d, %d", n.Tag, n.Words[0], n.Words[1]))
		}
	}
	return all
}

func (t *told) close() error {
	if t == nil {
		return nil
	}
	return t.events.Close()
}

// verdictOn returns what the handlers do with a frame, and how they leave it.
func verdictOn(h *loader.Handlers, frame *pcapng.Frame) (fv objectVerdict, left []byte) {
	fv = objectVerdict{Length: frame.Length, Captured: len(frame.Data)}
	was := h.Tally()
	v, err := h.Run(frame.Data)
	if err != nil {
		fv.Verdict, fv.Error = "error", err.Error()
		return fv, v.Frame
	}
	if h.Events() != nil {
		is := h.Tally()
		fv.Segment, fv.Why = segmentFate(&v, &was, &is)
		fv.Answered, fv.Mute = is.Acks != was.Acks, is.Mute != was.Mute
		v.Ran = fv.Segment != ""
	}
	if !v.Ran {
		fv.Verdict = "malformed"
		return fv, v.Frame
	}
	fv.Verdict, fv.Code, fv.Failed = v.Action.String(), v.Code.String(), v.Failed
	if fv.Segment == segmentHanded {
		fv.Verdict = segmentHanded
	}
	return fv, v.Frame
}

// An after writes the frames that handlers do not drop. Nil writes nothing.
type after struct {
	file lateFile
	out  *pcapng.Writer
}

func newAfter(f *objectFlags) *after {
	if f.write == "" {
		return nil
	}
	a := &after{file: lateFile{path: f.write}}
	a.out = pcapng.NewWriter(&a.file, "XsPIN", pcapng.Interface{Name: filepath.Base(f.pcap), Description: "after the handlers"})
	return a
}

// frame writes a frame as the handlers have left it.
func (a *after) frame(v *objectVerdict, left []byte) error {
	if a == nil {
		return nil
	}
	f := pcapng.Frame{Data: left, Length: v.Length, Comments: []string{fmt.Sprintf("frame %d: %s", v.Number, v.Verdict)}}
	switch v.Verdict {
	case "send":
		f.Direction = pcapng.Out
	case "stack", "malformed":
		f.Direction = pcapng.In
	default:
		return nil
	}
	return a.out.Frame(&f, time.Now().UnixNano())
}

func (a *after) close() error {
	if a == nil {
		return nil
	}
	return errors.Join(a.out.Flush(), a.file.close())
}

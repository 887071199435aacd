// Small pictures, drawn with lines of the colour of the text.

const icon = (path) => () => (
  <svg class="icon" viewBox="0 0 24 24" aria-hidden="true">
    <path d={path} />
  </svg>
);

export const Again = icon("M20 11a8 8 0 1 0-2 6M20 4v7h-7");
export const Attach = icon("M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.3 3.3 0 0 1 4.7 4.7l-8.3 8.2a1.7 1.7 0 0 1-2.4-2.4L14.5 7");
export const Close = icon("M6 6l12 12M18 6L6 18");
export const Copy = icon("M9 9h11v11H9zM5 15H4V4h11v1");
export const Dark = icon("M20 14.5A8.5 8.5 0 1 1 9.5 4a7 7 0 0 0 10.5 10.500z");
export const Done = icon("M4 13l5 5L20 7");
export const Down = icon("M12 5v14M5 12l7 7 7-7");
export const Edit = icon("M4 20l1-5L16 4l4 4L9 19zM14 6l4 4");
export const Export = icon("M12 4v11M7 10.500l5 5 5-5M4 20h16");
export const File = icon("M6 3h8l5 5v13H6zM14 3v5h5");
export const GoOn = icon("M5 5v14M10 6l9 6-9 6z");
export const Help = icon("M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18M9.5 9.500a2.5 2.5 0 1 1 3.7 2.200c-.8.5-1.2 1-1.2 2M12 16.800v.1");
export const Import = icon("M12 15V4M7 8.500l5-5 5 5M4 20h16");
export const Later = icon("M9 5l7 7-7 7");
export const Light = icon("M12 16.500a4.5 4.5 0 1 0 0-9 4.5 4.5 0 0 0 0 9M12 2v2.500M12 19.500V22M2 12h2.500M19.5 12H22M5 5l1.7 1.700M17.3 17.300L19 19M19 5l-1.7 1.700M6.7 17.300L5 19");
export const List = icon("M4 4h16v16H4zM9.5 4v16");
export const New = icon("M12 5v14M5 12h14");
export const Picture = icon("M4 5h16v14H4zM4 16l5-5 5 5 2.500-2.500L20 17M15.5 10.500a1.5 1.5 0 1 0 0-3 1.5 1.5 0 0 0 0 3");
export const Remove = icon("M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13M10 11v5M14 11v5");
export const Former = icon("M15 5l-7 7 7 7");
export const Send = icon("M12 19V5M5 12l7-7 7 7");
export const Settings = icon("M4 7h9M19 7h1M4 17h1M11 17h9M13 4.5v5h4v-5zM6 14.5v5h4v-5z");
export const Stop = icon("M7 7h10v10H7z");
export const System = icon("M3 5h18v11H3zM8 20h8M12 16v4");
export const Stone = icon(
  "M22 12a10 10 0 1 1-20 0 10 10 0 0 1 20 0M14.5 12a2.5 2.5 0 1 1-5 0 2.5 2.5 0 0 1 5 0" +
    "M12 6.5q3-1 4.5.5M17.5 12q1 3-.5 4.5M12 17.5q-3 1-4.5-.5M6.5 12q-1-3 .5-4.5",
);
